"""Attention over the engine's KV: one function that transformers' modules call in every layer.

The tokens of a step lie flat in one row, first one token of each decoding request, then the stretches that are
prefilled. Per layer the function writes their keys and values into the slots and attends:

    decoding   requests in neighbouring slots form a run: one batched matrix multiplication over a run's longest window.
               Siblings that read a common prefix in place form a group: one multiplication for all their queries.
    prefill    each stretch alone, by torch's fused attention.

Shapes: T tokens, B decoding requests, H query heads, K key-value heads, G = H / K, D head size, W columns.

What it does not do: sliding windows, sinks, soft caps (`forward` checks a family before it is served).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from etude.errors import ModelError
from etude.inference.kv import KVMemory

NAME = "etude_engine"
CALL_COST = 64
"""Columns of one request that may be computed in vain to save a call."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks")


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request that decodes: its slot, how many tokens the slot holds with the new one, and what it reads before."""

    slot: int
    own: int
    parent: int
    base: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` tokens to prefill, at `offset` of the flat row; they go to `start` on of `slot`."""

    slot: int
    start: int
    count: int
    offset: int
    parent: int
    base: int


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [first, last) whose slots follow each other from `slot` on."""

    first: int
    last: int
    slot: int
    columns: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [first, last) that read the first `base` tokens of slot `parent`."""

    first: int
    last: int
    parent: int
    base: int


class Plan:
    """Who attends to what in one step."""

    def __init__(self, memory: KVMemory, decode: Sequence[DecodeRow], stretches: Sequence[Stretch]) -> None:
        """decode: those that read the same prefix together, each such set in the order of its slots."""
        self.memory = memory
        self.num_decode = len(decode)
        self.stretches = [(stretch, _mask(stretch.base + stretch.start, stretch.count)) for stretch in stretches]
        """Each with the mask that all its layers share."""
        self.runs = _runs(decode)
        self.groups = _groups(decode)
        self.prefix = max((row.base for row in decode), default=0)
        self.columns = self.prefix + max((row.own for row in decode), default=0)
        self.slots = torch.tensor([row.slot for row in decode])
        own = torch.tensor([row.own for row in decode])
        self.last = own - 1
        column = torch.arange(self.columns)
        hidden = column[None, :] >= own[:, None] + self.prefix
        if self.prefix:
            base = torch.tensor([row.base for row in decode])
            hidden |= (column[None, :] >= base[:, None]) & (column[None, :] < self.prefix)
        self.hidden = hidden[:, None, None, :] if bool(hidden.any()) else None
        """[B, 1, 1, W] bool: columns that a row must not see; None if each sees all."""


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
        return _fused(query, key, value, scale, None).transpose(1, 2), None
    layer = module.layer_idx
    assert isinstance(layer, int)
    rows = (array[0].transpose(0, 1) for array in (query, key, value))
    return attend_over_kv(*rows, layer=layer, scale=scale, plan=plan)[None], None


def attend_over_kv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scale: float, plan: Plan
) -> torch.Tensor:
    """Write the new keys and values, then attend. query: [T, H, D]; key, value: [T, K, D]. Returns [T, H, D]."""
    keys, values = plan.memory.keys[layer], plan.memory.values[layer]
    rows = plan.num_decode
    if rows:
        keys[plan.slots, :, plan.last] = key[:rows]
        values[plan.slots, :, plan.last] = value[:rows]
        decoded = decode(query[:rows], keys, values, scale, plan)
        if not plan.stretches:
            return decoded
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    if rows:
        output[:rows] = decoded
    for stretch, mask in plan.stretches:
        place = slice(stretch.offset, stretch.offset + stretch.count)
        end = stretch.start + stretch.count
        keys[stretch.slot, :, stretch.start : end] = key[place].transpose(0, 1)
        values[stretch.slot, :, stretch.start : end] = value[place].transpose(0, 1)
        seen = keys[stretch.slot, :, :end], values[stretch.slot, :, :end]
        if stretch.base:
            shared = keys[stretch.parent, :, : stretch.base], values[stretch.parent, :, : stretch.base]
            seen = torch.cat((shared[0], seen[0]), dim=1), torch.cat((shared[1], seen[1]), dim=1)
        found = _fused(query[place].transpose(0, 1)[None], seen[0][None], seen[1][None], scale, mask)
        output[place] = found[0].transpose(0, 1)
    return output


def decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, plan: Plan) -> torch.Tensor:
    """One token a request. query: [B, H, D]; keys, values: [slots, K, window, D]. Returns [B, H, D]."""
    rows, heads, _ = query.shape
    kv_heads = keys.shape[1]
    query = (query * scale).reshape(rows, kv_heads, heads // kv_heads, -1)
    scores = query.new_empty(rows, kv_heads, heads // kv_heads, plan.columns)
    for group in plan.groups:
        members = slice(group.first, group.last)
        prefix = keys[group.parent, :, : group.base].transpose(1, 2)
        found = torch.bmm(_by_head(query[members]), prefix)
        scores[members, :, :, : group.base] = _by_row(found, group.last - group.first)
    for run in plan.runs:
        near = keys[run.slot : run.slot + run.last - run.first, :, : run.columns]
        place = slice(plan.prefix, plan.prefix + run.columns)
        scores[run.first : run.last, :, :, place] = torch.matmul(query[run.first : run.last], near.transpose(-1, -2))
    if plan.hidden is not None:
        scores.masked_fill_(plan.hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = query.new_empty(rows, kv_heads, heads // kv_heads, values.shape[-1])
    for run in plan.runs:
        near = values[run.slot : run.slot + run.last - run.first, :, : run.columns]
        place = slice(plan.prefix, plan.prefix + run.columns)
        output[run.first : run.last] = torch.matmul(weights[run.first : run.last, :, :, place], near)
    for group in plan.groups:
        members = slice(group.first, group.last)
        together = _by_head(weights[members, :, :, : group.base])
        found = torch.bmm(together, values[group.parent, :, : group.base])
        output[members] += _by_row(found, group.last - group.first)
    return output.view(rows, heads, -1)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """[members, K, G, n] -> [K, members * G, n]."""
    return rows.transpose(0, 1).reshape(rows.shape[1], -1, rows.shape[-1])


def _by_row(heads: torch.Tensor, members: int) -> torch.Tensor:
    """[K, members * G, n] -> [members, K, G, n]."""
    return heads.view(heads.shape[0], members, -1, heads.shape[-1]).transpose(0, 1)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """[1, H, count, D] queries, the last `count` positions of the keys. Returns [1, H, count, D]."""
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1, scale=scale, enable_gqa=True
    )


def _mask(past: int, count: int) -> torch.Tensor | None:
    """[count, past + count] bool: what each of `count` tokens sees; None where that needs no saying."""
    if past == 0 or count == 1:
        return None
    return torch.ones(count, past + count, dtype=torch.bool).tril(past)


def _runs(decode: Sequence[DecodeRow]) -> tuple[Run, ...]:
    """Neighbouring slots together, unless their lengths differ so much that a call of its own is cheaper."""
    runs: list[Run] = []
    first, columns = 0, 0
    for index, row in enumerate(decode):
        size = index - first
        adjacent = size > 0 and row.slot == decode[index - 1].slot + 1
        in_vain = max(columns, row.own) * (size + 1) - columns * size - row.own  # computed more than there is to see
        if size and (not adjacent or in_vain > CALL_COST):
            runs.append(_run(decode, first, index, columns))
            first, columns = index, 0
        columns = max(columns, row.own)
    if decode:
        runs.append(_run(decode, first, len(decode), columns))
    return tuple(runs)


def _run(decode: Sequence[DecodeRow], first: int, last: int, columns: int) -> Run:
    return Run(first=first, last=last, slot=decode[first].slot, columns=columns)


def _groups(decode: Sequence[DecodeRow]) -> tuple[Group, ...]:
    groups: list[Group] = []
    first = 0
    for index, row in enumerate(decode):
        if index + 1 < len(decode) and (decode[index + 1].parent, decode[index + 1].base) == (row.parent, row.base):
            continue
        if row.base:
            groups.append(Group(first=first, last=index + 1, parent=row.parent, base=row.base))
        first = index + 1
    return tuple(groups)


AttentionInterface.register(NAME, attend)
