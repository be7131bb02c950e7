"""The `engine` table of a recipe. Light: it loads nothing but errors."""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import RecipeError

KINDS = ("torch",)
KV_REUSE = ("context", "version", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRecipe:
    """How tokens are sampled. Errors: RecipeError for a value that cannot be honored."""

    kind: str = "torch"
    """torch: the network's own modules on one process, KV in contiguous memory."""
    replicas: int = 1
    """Engine processes that share the episodes of training."""
    max_concurrent: int = 128
    """Requests decoded at once; further ones wait."""
    max_queue: int = 1024
    """Requests that may wait; beyond that a request is refused as overloaded."""
    kv_reuse: str = "context"
    """What a new request may reuse. context: its context's own KV, of any version, and others' KV of the serving
    version (training). version: only KV of the serving version (serving). none: nothing (benchmarks)."""
    kv_tokens: int = 0
    """Tokens of KV kept, over all contexts; idle contexts are evicted, the longest unused first. 0: as many as a
    quarter of the memory that is free at the start holds."""
    threads: int = 1
    """Processor threads of one engine."""
    pin_timeout_s: float = 60.0
    """How long requests that are pinned to a version may delay a swap before they fail."""
    seed: int = 0
    """Of requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecipeError(f"engine.kind = {self.kind!r} is not supported", hint=f"use one of: {', '.join(KINDS)}")
        if self.kv_reuse not in KV_REUSE:
            hint = f"use one of: {', '.join(KV_REUSE)}"
            raise RecipeError(f"engine.kv_reuse = {self.kv_reuse!r} is not supported", hint=hint)
        bounds = {
            "replicas": (1, 256),
            "max_concurrent": (1, 4096), "max_queue": (0, 1 << 20), "kv_tokens": (0, 1 << 40), "threads": (1, 1024),
            "pin_timeout_s": (0.0, 86_400.0), "seed": (0, (1 << 63) - 1),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise RecipeError(f"engine.{name} = {value} is out of range", hint=f"use {low} to {high}")
