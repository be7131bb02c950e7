"""Decoding over slots, runs and shared prefixes gives what plain attention gives for each request alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from etude.inference.attention import CALL_COST, DecodeRow, Plan, Stretch, decode
from etude.inference.kv import KVMemory, LayerShape

HEADS, KV_HEADS, DIM, WINDOW, SLOTS = 4, 2, 8, 192, 12


@pytest.fixture(scope="module")
def memory() -> KVMemory:
    shape = LayerShape(heads=KV_HEADS, key_dim=DIM, value_dim=DIM)
    made = KVMemory([shape], slots=SLOTS, window=WINDOW, budget_tokens=SLOTS * WINDOW, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for array in (*made.keys, *made.values):
        array.copy_(torch.randn(array.shape, generator=generator))
    return made


def plainly(query: torch.Tensor, memory: KVMemory, row: DecodeRow) -> torch.Tensor:
    """[H, D] of one request: its whole past laid out, then torch's own attention."""
    keys, values = (
        torch.cat((array[row.parent, :, : row.base], array[row.slot, :, : row.own]), dim=1)[None]
        for array in (memory.keys[0], memory.values[0])
    )
    return functional.scaled_dot_product_attention(query[None, :, None], keys, values, scale=0.3, enable_gqa=True)[
        0, :, 0
    ]


ROWS = st.lists(
    st.tuples(st.integers(1, WINDOW), st.sampled_from([(0, 0), (10, 100), (10, 37), (11, 5)])), min_size=1, max_size=10
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, gaps=st.sets(st.integers(0, 9), max_size=5))
def test_decoding_equals_plain_attention(
    memory: KVMemory, rows: list[tuple[int, tuple[int, int]]], gaps: set[int]
) -> None:
    slots = [slot for slot in range(10) if slot not in gaps]
    work = [
        DecodeRow(slot=slot, own=own, parent=parent, base=base)
        for slot, (own, (parent, base)) in zip(slots, rows, strict=False)
    ]
    work.sort(key=lambda row: (row.parent, row.base, row.slot))
    query = torch.randn(len(work), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    got = decode(query, memory.keys[0], memory.values[0], 0.3, Plan(memory, work, []))
    for index, row in enumerate(work):
        assert torch.allclose(got[index], plainly(query[index], memory, row), atol=1e-5)


def test_neighbours_of_like_length_form_a_run_and_others_do_not(memory: KVMemory) -> None:
    def runs(*rows: tuple[int, int]) -> list[tuple[int, int, int, int]]:
        plan = Plan(memory, [DecodeRow(slot=slot, own=own, parent=0, base=0) for slot, own in rows], [])
        return [(run.first, run.last, run.slot, run.columns) for run in plan.runs]

    assert runs((0, 50), (1, 52), (2, 49)) == [(0, 3, 0, 52)]
    assert runs((0, 50), (2, 50)) == [(0, 1, 0, 50), (1, 2, 2, 50)]
    assert runs((0, 10), (1, 10 + CALL_COST + 1)) == [(0, 1, 0, 10), (1, 2, 1, 11 + CALL_COST)]
    assert runs((0, 10), (1, 10 + CALL_COST)) == [(0, 2, 0, 10 + CALL_COST)]


def test_members_of_a_prefix_form_one_group(memory: KVMemory) -> None:
    rows = [DecodeRow(slot=2, own=3, parent=0, base=0)]
    rows += [DecodeRow(slot=slot, own=3, parent=11, base=64) for slot in (0, 1, 3)]
    rows += [DecodeRow(slot=4, own=3, parent=11, base=32)]
    groups = [(group.first, group.last, group.parent, group.base) for group in Plan(memory, rows, []).groups]
    assert groups == [(1, 4, 11, 64), (4, 5, 11, 32)]


def test_a_plan_without_decoding_has_no_runs(memory: KVMemory) -> None:
    plan = Plan(memory, [], [Stretch(slot=0, start=0, count=4, offset=0, parent=0, base=0)])
    assert plan.runs == ()
    assert plan.groups == ()
    assert plan.num_decode == 0
