"""Settings of the weight store. Light: reading a recipe loads nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from etude.errors import RecipeError

PUBLISH_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Recipe name -> safetensors name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRecipe:
    """Where versions are published, in which rounding, and how long they are kept."""

    store: str = "file://{run}/weights"
    """URL: file://, s3:// (keys, region and endpoint from the AWS_* environment) or, inside one process, memory://.
    `{run}` stands for the run's folder."""
    publish_dtype: str = "float32"
    """float32 or bfloat16: the rounding that engines serve and that the trainer's forward pass uses."""
    anchor_every: int = 25
    """Every so many versions one holds all tensors in full; those between are differences. 1: all do."""
    keep_anchors: int = 3
    """How many of these are kept of the surviving lineage, with all that came after the oldest of them; beside pins and
    leases."""
    pins: tuple[int, ...] = ()
    """Steps whose versions are always published, and stay for good: policies to compare with later."""
    threads: int = 2
    """Cores that coding and reading a version may use, on each side."""
    poll_s: float = 0.05
    """Seconds between a reader's looks at the store."""
    grace_s: float = 120.0
    """Seconds for which the parts of a deleted version stay: longer than the slowest fetch and the slowest publish."""

    def __post_init__(self) -> None:
        scheme = self.store.partition("://")[0]
        if scheme not in ("file", "s3", "memory"):
            raise RecipeError(f"weights.store = {self.store!r} is not supported", hint="file://, s3:// or memory://")
        if self.publish_dtype not in PUBLISH_DTYPES:
            names = ", ".join(PUBLISH_DTYPES)
            raise RecipeError(f"weights.publish_dtype = {self.publish_dtype!r} is unknown", hint=f"one of {names}")
        for name in ("anchor_every", "keep_anchors", "threads"):
            if getattr(self, name) < 1:
                raise RecipeError(f"weights.{name} = {getattr(self, name)} must be at least 1")
        if any(step < 0 for step in self.pins):
            raise RecipeError(f"weights.pins = {list(self.pins)} names a negative step", hint="steps from 0 on")
        if self.poll_s <= 0 or self.grace_s <= 0:
            raise RecipeError("weights.poll_s and weights.grace_s must be positive")

    def url(self, run: Path) -> str:
        """The store's URL with `{run}` filled in."""
        return self.store.replace("{run}", quote(str(run.absolute())))
