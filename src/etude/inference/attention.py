"""Attention over the engine's KV: one function that transformers' modules call in every layer.

The tokens of a step lie flat in one row, first one token of each decoding request, then the stretches that are
prefilled. Per layer the function writes their keys and values into the slots and attends:

    decoding   both products are weighted sums of rows of KV memory, gathered by index (an embedding bag): scores sum
               the D rows of a chunk of keys, weighted by the query; the output sums rows of values, weighted by them.
               So each request reads exactly its own past, wherever it lies, shared beginnings included, at the speed
               of memory; a batched matrix multiplication of one query row is far slower on many processors.
    prefill    each stretch alone, by torch's fused attention.

Shapes: T tokens, B decoding requests, H query heads, K key-value heads, G = H / K, D head size, C chunks of keys.

What it does not do: sliding windows, sinks, soft caps (`forward` checks a family before it is served).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from etude.errors import ModelError
from etude.inference.kv import CHUNK, KVMemory

NAME = "etude_engine"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks")


@dataclass(frozen=True, slots=True)
class Span:
    """`count` new tokens of one request; they go to `start` on of `slot`. What is before lies in the slot too, and
    before that the first `base` tokens of slot `parent`. `base` is a multiple of CHUNK."""

    slot: int
    start: int
    count: int
    parent: int
    base: int


class Plan:
    """Who attends to what in one step: `decode` spans of one token each, then `prefill` spans."""

    def __init__(self, memory: KVMemory, decode: Sequence[Span], prefill: Sequence[Span]) -> None:
        self.memory = memory
        self.num_decode = len(decode)
        spans = [*decode, *prefill]
        counts = np.array([span.count for span in spans])
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(np.array([span.start for span in spans]) - ends + counts, counts)
        self._slots, self._places = np.repeat(np.array([span.slot for span in spans]), counts), places
        starts = (ends - counts)[len(decode) :].tolist()
        self.stretches = [
            Stretch(span, start, memory.keys[0].dtype) for span, start in zip(prefill, starts, strict=True)
        ]
        self.width = 0
        """Columns of the decoding requests' scores, C * CHUNK."""
        self.hidden = torch.zeros(0)
        """[B, 1, width]: -inf for the columns beyond a request's past, else 0."""
        if decode:
            self._plan_decode(decode)
        self._bags: dict[tuple[int, int, int, int], Bags] = {}
        self._targets: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def _plan_decode(self, decode: Sequence[Span]) -> None:
        base = np.array([span.base for span in decode])
        lengths = np.array([span.base + span.start + 1 for span in decode])
        chunks = np.arange(-(-int(lengths.max()) // CHUNK))[None]
        self.width = chunks.size * CHUNK
        slot = np.array([span.slot for span in decode])[:, None]
        parent = np.array([span.parent for span in decode])[:, None]
        shared = base[:, None] // CHUNK
        # Columns beyond a request's past are computed on its first chunk, which is warm, and hidden.
        exists = chunks * CHUNK < lengths[:, None]
        self._chunk_slot = np.where(chunks < shared, parent, slot)
        self._chunk = np.where(chunks < shared, chunks, np.where(exists, chunks - shared, 0))
        hidden = np.where(np.arange(self.width)[None] >= lengths[:, None], -np.inf, 0.0)
        self.hidden = torch.from_numpy(hidden.astype(np.float32))[:, None]

    def targets(self, kv_heads: int, key_dim: int, value_dim: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer of this shape has the new tokens' keys, number by number [T * K * D], and values, row by row
        [T * K], in its memory laid flat. One flat index is several times as fast as five."""
        shape = (kv_heads, key_dim, value_dim, window)
        if shape not in self._targets:
            heads = self._slots[:, None] * kv_heads + np.arange(kv_heads)  # [T, K]
            chunk = heads * (window // CHUNK) + self._places[:, None] // CHUNK
            rows = chunk[..., None] * key_dim + np.arange(key_dim)
            keys = rows * CHUNK + self._places[:, None, None] % CHUNK
            values = heads * window + self._places[:, None]
            self._targets[shape] = torch.from_numpy(keys.reshape(-1)), torch.from_numpy(values.reshape(-1))
        return self._targets[shape]

    def bags(self, heads: int, kv_heads: int, dim: int, layer_window: int) -> Bags:
        """Indices for a layer of this shape; most networks have one shape, so they are made once a step."""
        shape = (heads, kv_heads, dim, layer_window)
        if shape not in self._bags:
            self._bags[shape] = self._make_bags(*shape)
        return self._bags[shape]

    def _make_bags(self, heads: int, kv_heads: int, dim: int, window: int) -> Bags:
        rows, chunks = self._chunk.shape
        groups = heads // kv_heads
        head = np.arange(kv_heads)[None, :, None]
        block = (self._chunk_slot[:, None] * kv_heads + head) * (window // CHUNK) + self._chunk[:, None]  # [B, K, C]
        kind = np.int32 if (int(block.max()) + 1) * max(dim, CHUNK) < 1 << 31 else np.int64
        block = np.repeat(block.astype(kind), groups, axis=1)  # [B, H, C]
        keys = block[..., None] * kind(dim) + np.arange(dim, dtype=kind)
        values = block[..., None] * kind(CHUNK) + np.arange(CHUNK, dtype=kind)
        return Bags(
            keys=torch.from_numpy(keys.reshape(-1)),
            key_starts=torch.from_numpy(np.arange(rows * heads * chunks, dtype=kind) * kind(dim)),
            values=torch.from_numpy(values.reshape(-1)),
            value_starts=torch.from_numpy(np.arange(rows * heads, dtype=kind) * kind(self.width)),
        )


@dataclass(frozen=True, slots=True)
class Bags:
    """Rows of KV memory to be summed. Keys: D rows for each chunk; values: `width` rows for each query head."""

    keys: torch.Tensor
    key_starts: torch.Tensor
    values: torch.Tensor
    value_starts: torch.Tensor


class Stretch:
    """A span that is prefilled, its place in the flat row, and the mask that all its layers share."""

    def __init__(self, span: Span, start: int, dtype: torch.dtype) -> None:
        self.span = span
        self.place = slice(start, start + span.count)
        self.past = span.base + span.start
        self.mask = None
        if self.past and span.count > 1:
            # Added to the scores: torch would make this of a mask of bools in each layer anew.
            seen = torch.full((span.count, self.past + span.count), -torch.inf, dtype=dtype)
            self.mask = seen.triu_(self.past + 1)

    def seen(self, memory: KVMemory, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole window, [K, past + count, D]."""
        span = self.span
        return memory.window_of(layer, span.slot, span.parent, span.base, self.past + span.count)


_current = threading.local()


@contextmanager
def using(plan: Plan | None) -> Iterator[None]:
    """Forwards of this thread inside the block follow `plan`; None: plain causal attention of one window, no KV."""
    _current.plan = plan
    try:
        yield
    finally:
        _current.plan = None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. query: [1, H, T, D]; key, value: [1, K, T, D]. Returns [1, T, H, D]."""
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise ModelError(f"attention of {type(module).__name__} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan: Plan | None = getattr(_current, "plan", None)
    if plan is None:
        return _fused(query[0], key[0], value[0], scale, None).transpose(0, 1)[None], None
    layer = module.layer_idx
    assert isinstance(layer, int)
    rows = (array[0].transpose(0, 1) for array in (query, key, value))
    return attend_over_kv(*rows, layer=layer, scale=scale, plan=plan)[None], None


def attend_over_kv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scale: float, plan: Plan
) -> torch.Tensor:
    """Write the new keys and values, then attend. query: [T, H, D]; key, value: [T, K, D]. Returns [T, H, D]."""
    keys, values = plan.memory.keys[layer], plan.memory.values[layer]
    to_keys, to_values = plan.targets(keys.shape[1], keys.shape[3], values.shape[3], values.shape[2])
    keys.view(-1).scatter_(0, to_keys, key.reshape(-1))
    values.view(-1, values.shape[3]).index_copy_(0, to_values, value.reshape(-1, values.shape[3]))
    rows = plan.num_decode
    if rows and not plan.stretches:
        return decode(query, keys, values, scale, plan)
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    if rows:
        output[:rows] = decode(query[:rows], keys, values, scale, plan)
    for stretch in plan.stretches:
        place = stretch.place
        seen_keys, seen_values = key[place].transpose(0, 1), value[place].transpose(0, 1)
        if stretch.past:
            seen_keys, seen_values = stretch.seen(plan.memory, layer)
        found = _fused(query[place].transpose(0, 1), seen_keys, seen_values, scale, stretch.mask)
        output[place] = found.transpose(0, 1)
    return output


def decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, plan: Plan) -> torch.Tensor:
    """One token a request. query: [B, H, D]; keys: [slots, K, C, D, CHUNK]; values: [slots, K, window, D]."""
    rows, heads, dim = query.shape
    bags = plan.bags(heads, keys.shape[1], dim, values.shape[2])
    query = query if scale == 1.0 else query * scale
    weights = query[:, :, None].expand(-1, -1, plan.width // CHUNK, -1).reshape(-1)
    scores = _bag(keys.view(-1, CHUNK), bags.keys, bags.key_starts, weights).view(rows, heads, plan.width)
    weights = torch.softmax(scores.float().add_(plan.hidden), dim=-1).to(query.dtype)
    return _bag(values.view(-1, values.shape[-1]), bags.values, bags.value_starts, weights.view(-1)).view(
        rows, heads, -1
    )


def _bag(table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums of weighted rows of `table`; bag i has the rows from starts[i] to starts[i + 1]."""
    return functional.embedding_bag(rows, table, starts, mode="sum", per_sample_weights=weights)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """[H, count, D] queries, the last `count` positions of the keys [K, past + count, D]. Returns [H, count, D]."""
    return functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None and query.shape[1] > 1,
        scale=scale, enable_gqa=True,
    )[0]  # fmt: skip


AttentionInterface.register(NAME, attend)
