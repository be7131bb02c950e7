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
    keep_anchors: int = 3
    """How many full versions of the surviving lineage are kept, beside pins and leases."""
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
        if self.keep_anchors < 1:
            raise RecipeError(f"weights.keep_anchors = {self.keep_anchors} must be at least 1")
        if self.poll_s <= 0 or self.grace_s <= 0:
            raise RecipeError("weights.poll_s and weights.grace_s must be positive")

    def url(self, run: Path) -> str:
        """The store's URL with `{run}` filled in."""
        return self.store.replace("{run}", quote(str(run.absolute())))
