"""Where keys and values live: one slot a context, in memory that exists once it is written.

Per layer there is one array for keys and one for values. Values lie as [slots, heads, window, dim]; keys lie in chunks
of CHUNK tokens and transposed within a chunk, [slots, heads, chunks, dim, CHUNK], which is how decoding sums them
(`attention`). Nothing is copied when requests come and go, and a slot never has to grow: the arrays are reserved
address space, and the system backs a page when it is first written. What a freed slot had written is given back to the
system when the budget calls for it.

A slot is counted by how many contexts read it: siblings read the prefix of a prompt where the first of them wrote it.

What it does not do: know tokens, versions or contexts (`contexts`), or compute attention (`attention`).
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude.errors import EngineError

CHUNK = 64
"""Tokens of a chunk of keys. What is read in place of another context ends with a chunk."""
_MAP_NORESERVE = 0x4000


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer keeps of a token."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one window's KV. `refs` contexts read it; `tokens` are reserved for its owner."""

    index: int
    tokens: int
    refs: int = 1


class KVMemory:
    """Slots of `window` tokens each, at most `budget_tokens` reserved at once."""

    def __init__(
        self, layers: Sequence[LayerShape], *, slots: int, window: int, budget_tokens: int, dtype: torch.dtype
    ) -> None:
        """Errors: EngineError if the address space cannot be reserved."""
        self.layers = tuple(layers)
        self.window = _round_up(window, CHUNK)
        self.budget_tokens = budget_tokens
        self.reserved_tokens = 0
        self._free = list(range(slots))
        self._touched = [0] * slots
        self._maps: list[tuple[mmap.mmap, int]] = []
        chunks = self.window // CHUNK
        self.keys = [self._reserve((slots, x.heads, chunks, x.key_dim, CHUNK), dtype) for x in self.layers]
        self.values = [self._reserve((slots, x.heads, self.window, x.value_dim), dtype) for x in self.layers]

    def fits(self, tokens: int, *, new_slot: bool) -> bool:
        """Whether `tokens` more could be reserved now, in a slot of their own or in one that is there."""
        return (bool(self._free) or not new_slot) and self.reserved_tokens + tokens <= self.budget_tokens

    def take(self, tokens: int) -> Slot:
        """The lowest free slot, so that slots in use lie together."""
        assert self.fits(tokens, new_slot=True), (tokens, self.reserved_tokens, self.budget_tokens)
        slot = Slot(heapq.heappop(self._free), tokens)
        self.reserved_tokens += tokens
        self._touched[slot.index] = max(self._touched[slot.index], tokens)
        if sum(self._touched) > self.budget_tokens:
            self._give_back()
        return slot

    def resize(self, slot: Slot, tokens: int) -> None:
        """Reserve more or fewer tokens for a slot in use."""
        self.reserved_tokens += tokens - slot.tokens
        slot.tokens = tokens
        self._touched[slot.index] = max(self._touched[slot.index], tokens)

    def drop(self, slot: Slot) -> None:
        """One reader less; the last one frees the slot."""
        slot.refs -= 1
        assert slot.refs >= 0, slot
        if slot.refs == 0:
            self.reserved_tokens -= slot.tokens
            heapq.heappush(self._free, slot.index)

    def copy(self, source: Slot, target: Slot, tokens: int, *, start: int = 0, to: int = 0) -> None:
        """`tokens` positions of all layers from `start` on, to position `to` on; both are multiples of CHUNK."""
        if tokens <= 0:
            return
        assert start % CHUNK == 0 == to % CHUNK, (start, to)
        count = -(-tokens // CHUNK)
        first, place = start // CHUNK, to // CHUNK
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target.index, :, place : place + count] = keys[source.index, :, first : first + count]
            values[target.index, :, to : to + tokens] = values[source.index, :, start : start + tokens]

    def window_of(
        self, layer: int, slot: int, parent: int, base: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a whole window, [heads, length, dim]: `base` tokens of `parent`, the rest of `slot`."""
        keys, values = self.keys[layer], self.values[layer]
        chunks = keys[slot, :, : -(-(length - base) // CHUNK)]
        rows = values[slot, :, : length - base]
        if base:
            chunks = torch.cat((keys[parent, :, : base // CHUNK], chunks), dim=1)
            rows = torch.cat((values[parent, :, :base], rows), dim=1)
        return chunks.transpose(2, 3).reshape(chunks.shape[0], -1, chunks.shape[2])[:, :length], rows

    def wipe_free(self) -> None:
        """Zeros wherever a free slot was written."""
        for index in self._free:
            if self._touched[index]:
                for array in (*self.keys, *self.values):
                    array[index].zero_()

    def _reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        slots = shape[0]
        nbytes = int(np.prod(shape)) * dtype.itemsize
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            memory = mmap.mmap(-1, _round_up(nbytes, mmap.PAGESIZE), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"no address space for {slots} windows of {self.window} tokens",
                cause=str(error),
                hint="lower engine.max_concurrent",
            ) from error
        # Huge pages would back 2 MB for the first token of a window, and zero it in the middle of a step.
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._maps.append((memory, nbytes // slots))
        return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize).view(shape)

    def _give_back(self) -> None:
        """Return the pages of free slots to the system; they read as zeros afterwards."""
        for index in self._free:
            if not self._touched[index]:
                continue
            self._touched[index] = 0
            for memory, stride in self._maps:
                start = _round_up(index * stride, mmap.PAGESIZE)
                end = (index + 1) * stride // mmap.PAGESIZE * mmap.PAGESIZE
                if end > start:
                    memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Of KV, over all layers."""
    return sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
