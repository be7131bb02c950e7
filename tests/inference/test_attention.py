"""Decoding over slots and shared beginnings gives what plain attention gives for each request alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from etude.inference.attention import Plan, Span, attend_over_kv, decode
from etude.inference.kv import CHUNK, KVMemory, LayerShape

DIM, WINDOW, SLOTS = 8, 3 * CHUNK, 12
PARENTS = [(0, 0), (10, CHUNK), (10, 2 * CHUNK), (11, CHUNK)]


def filled(kv_heads: int) -> KVMemory:
    shape = LayerShape(heads=kv_heads, key_dim=DIM, value_dim=2 * DIM)
    made = KVMemory([shape], slots=SLOTS, window=WINDOW, budget_tokens=SLOTS * WINDOW, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for array in (*made.keys, *made.values):
        array.copy_(torch.randn(array.shape, generator=generator))
    return made


MEMORIES = {(4, 2): filled(2), (3, 3): filled(3), (4, 1): filled(1)}


def plainly(query: torch.Tensor, memory: KVMemory, span: Span) -> torch.Tensor:
    """[H, count, D] of one request, query [count, H, D]: its whole past laid out, then torch's own attention."""
    length = span.base + span.start + span.count
    keys, values = memory.window_of(0, span.slot, span.parent, span.base, length)
    mask = torch.ones(span.count, length, dtype=torch.bool).tril(length - span.count)
    return functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=0.3, enable_gqa=True
    )[0]


@settings(max_examples=80, deadline=None)
@given(
    heads=st.sampled_from(sorted(MEMORIES)),
    rows=st.lists(st.tuples(st.integers(0, WINDOW - 1), st.sampled_from(PARENTS)), min_size=1, max_size=9),
    slots=st.permutations(range(10)),
)
def test_decoding_equals_plain_attention(
    heads: tuple[int, int], rows: list[tuple[int, tuple[int, int]]], slots: list[int]
) -> None:
    memory = MEMORIES[heads]
    spans = [
        Span(slot=slot, start=start, count=1, parent=parent, base=base)
        for slot, (start, (parent, base)) in zip(slots, rows, strict=False)
    ]
    query = torch.randn(len(spans), heads[0], DIM, generator=torch.Generator().manual_seed(1))
    got = decode(query, memory.keys[0], memory.values[0], 0.3, Plan(memory, spans, []))
    for index, span in enumerate(spans):
        assert torch.allclose(got[index], plainly(query[index : index + 1], memory, span)[:, 0], atol=1e-5)


@pytest.mark.parametrize("heads", sorted(MEMORIES))
def test_a_mixed_step_writes_every_token_where_it_belongs_and_attends(heads: tuple[int, int]) -> None:
    memory = filled(heads[1])
    decoding = [
        Span(slot=3, start=70, count=1, parent=0, base=0),
        Span(slot=1, start=0, count=1, parent=10, base=CHUNK),
    ]
    prefill = [
        Span(slot=7, start=0, count=90, parent=0, base=0),
        Span(slot=0, start=50, count=30, parent=11, base=2 * CHUNK),
        Span(slot=5, start=9, count=1, parent=0, base=0),
    ]
    spans = [*decoding, *prefill]
    tokens = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(tokens, heads[0], DIM, generator=generator)
    key = torch.randn(tokens, heads[1], DIM, generator=generator)
    value = torch.randn(tokens, heads[1], 2 * DIM, generator=generator)
    got = attend_over_kv(query, key, value, layer=0, scale=0.3, plan=Plan(memory, decoding, prefill))
    first = 0
    for span in spans:
        place = slice(first, first + span.count)
        keys, values = memory.window_of(0, span.slot, 0, 0, span.start + span.count)
        assert torch.equal(keys[:, span.start :], key[place].transpose(0, 1))
        assert torch.equal(values[:, span.start :], value[place].transpose(0, 1))
        assert torch.allclose(got[place].transpose(0, 1), plainly(query[place], memory, span), atol=1e-5)
        first += span.count
