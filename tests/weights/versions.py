"""Small versions for the tests of the weight store, and a store whose network fails on demand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from obstore.store import MemoryStore

from etude.errors import StoreError
from etude.types import Manifest
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Publisher, take_incarnation
from etude.weights.store import Data, Store


def tensors(seed: int) -> dict[str, Stored]:
    """Three tensors of three dtypes; only `head` and `norm` depend on the seed."""
    random = np.random.default_rng(seed)
    return {
        "head": Stored("F32", random.normal(size=(5, 7)).astype(np.float32)),
        "norm": Stored("BF16", random.integers(0, 1 << 16, size=9).astype(np.uint16)),
        "frozen": Stored("F16", np.arange(12, dtype=np.float16).reshape(3, 4)),
    }


def publish(publisher: Publisher, step: int) -> Manifest:
    return publisher.publish(Snapshot.take(step, tensors(step))).manifest


def new_publisher(store: Store, *, anchor_every: int = 1, **record: object) -> Publisher:
    return Publisher(store, take_incarnation(store, **record), anchor_every=anchor_every)  # type: ignore[arg-type]


class UnsteadyStore(Store):
    """In memory. `on_create` runs for each create and may raise, before or after the write."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory://unsteady")
        self.before: Callable[[str], None] = lambda key: None
        self.after: Callable[[str], None] = lambda key: None

    def create(self, key: str, data: Data) -> bool:
        self.before(key)
        created = super().create(key, data)
        self.after(key)
        return created


class Failing:
    """Raises a time-out the first `times` times, for keys of one folder."""

    def __init__(self, times: int, folder: str = "manifests/") -> None:
        self.left = times
        self.folder = folder

    def __call__(self, key: str) -> None:
        if key.startswith(self.folder) and self.left:
            self.left -= 1
            raise StoreError(f"creating {key} timed out")
