"""Whatever is opened, shared, evicted and forgotten: every context reads exactly the KV of its own ids.

The network is played by a hash: the "key" of a position is a number that depends on all ids up to there.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import version
from etude.inference.contexts import ContextKV, ContextTable
from etude.inference.kv import CHUNK, KVMemory, LayerShape
from tiny import random_ids

WINDOW = 192


def table_of(*, slots: int = 6, budget: int = 600, kv_reuse: str = "context") -> ContextTable:
    shape = LayerShape(heads=1, key_dim=16, value_dim=16)
    memory = KVMemory([shape], slots=slots, window=WINDOW, budget_tokens=budget, dtype=torch.float32)
    return ContextTable(memory, kv_reuse=kv_reuse)


def fingerprints(ids: np.ndarray) -> list[float]:
    """One number a position, of all ids up to it; exact in float32."""
    numbers, state = [], 0
    for token in ids.tolist():
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        numbers.append(float(state % (1 << 23)))
    return numbers


def compute(table: ContextTable, context: ContextKV, upto: int) -> None:
    """Write the KV of positions computed .. upto."""
    assert context.slot is not None
    numbers = torch.tensor(fingerprints(context.ids[:upto]))
    place = slice(context.computed - context.base, upto - context.base)
    table.memory.values[0][context.slot.index, 0, place, 0] = numbers[context.computed : upto]
    for position in range(context.computed, upto):
        chunk, offset = divmod(position - context.base, CHUNK)
        table.memory.keys[0][context.slot.index, 0, chunk, 0, offset] = numbers[position]
    context.computed = upto


def read(table: ContextTable, context: ContextKV) -> list[float]:
    """The KV of all computed positions, as attention would read it."""
    assert context.slot is not None
    parent = 0 if context.parent is None else context.parent.index
    keys, values = table.memory.window_of(0, context.slot.index, parent, context.base, context.computed)
    assert torch.equal(keys[0, :, 0], values[0, :, 0])
    return keys[0, :, 0].tolist()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "turn", "forget", "swap"]),
        st.integers(0, 7),  # context
        st.integers(0, 2),  # which prompt
        st.integers(1, 150),  # prompt length
        st.integers(1, 20),  # reply
        st.booleans(),  # continue the last window instead of the prompt
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, kv_reuse=st.sampled_from(["context", "version", "none"]))
def test_every_context_reads_the_kv_of_its_own_ids(
    actions: list[tuple[str, int, int, int, int, bool]], kv_reuse: str
) -> None:
    table, serving, windows = table_of(kv_reuse=kv_reuse), 0, dict[str, np.ndarray]()
    for kind, number, prompt, length, tokens, goes_on in actions:
        name = f"c{number}"
        if kind == "forget":
            table.forget(name)
        elif kind == "swap":
            serving += 1
            table.new_version()
        else:
            ids = random_ids(length, seed=prompt).numpy().astype(np.int32)
            if goes_on and name in windows and len(windows[name]) + length <= WINDOW - 20:
                ids = np.concatenate([windows[name], ids])
            windows[name] = turn(table, name, ids, tokens, serving)
    for number in range(8):
        table.forget(f"c{number}")
    assert table.memory.reserved_tokens == 0
    assert all(table.memory.fits(1, new_slot=True) and table.memory.take(1) for _ in range(6))


def turn(table: ContextTable, name: str, ids: np.ndarray, tokens: int, serving: int) -> np.ndarray:
    """One request: take over, compute the rest, reply. Returns the window."""
    limit = len(ids) + tokens
    context = table.open(name, ids, limit, version(serving))
    assert context is not None, "with nothing running, every window fits"
    assert context.computed < len(ids)
    assert read(table, context) == fingerprints(ids[: context.computed])
    assert context.slot is not None
    compute(table, context, len(ids))
    table.publish(context, version(serving))
    context.ids[len(ids) : limit] = np.arange(tokens) + 90
    compute(table, context, limit - 1)
    assert read(table, context) == fingerprints(context.ids[: limit - 1])
    # KV is of a version only with everything before it, and what is older always comes first
    fresh = 0 if context.stale(version(serving)) else context.computed
    assert context.of_version(version(serving)) == fresh
    window = context.ids[:limit].copy()
    table.close(context, version(serving))
    return window


def test_memory_is_reserved_for_the_longest_window_and_shrinks_to_what_is_used() -> None:
    table = table_of()
    context = table.open("c", np.arange(10, dtype=np.int32), 50, version(0))
    assert context is not None
    assert table.memory.reserved_tokens == 50
    compute(table, context, 20)
    table.close(context, version(0))
    assert table.memory.reserved_tokens == 20


def test_what_runs_is_not_evicted_and_a_request_without_room_waits() -> None:
    table = table_of(budget=100)
    running = table.open("a", np.arange(10, dtype=np.int32), 60, version(0))
    assert running is not None
    assert table.open("b", np.arange(10, dtype=np.int32), 60, version(0)) is None
    table.close(running, version(0))
    assert table.open("b", np.arange(10, dtype=np.int32), 60, version(0)) is not None


@pytest.mark.parametrize("own_turn_first", [True, False])
def test_siblings_in_place_survive_their_owners_rewrite(own_turn_first: bool) -> None:
    table = table_of()
    prompt = random_ids(80).numpy().astype(np.int32)
    turn(table, "owner", prompt, 5, 0)
    sibling = table.open("sibling", prompt, 100, version(0))
    assert sibling is not None
    assert (sibling.base, sibling.computed) == (64, 79)
    compute(table, sibling, 90)
    expected = read(table, sibling)
    other = np.concatenate([prompt[:30], random_ids(60, seed=9).numpy()]).astype(np.int32)
    turn(table, "owner", other if own_turn_first else prompt[:40], 5, 0)
    table.forget("owner")
    turn(table, "stranger", random_ids(100, seed=4).numpy().astype(np.int32), 5, 0)
    assert read(table, sibling) == expected
