"""KV memory: slots are taken lowest first, counted by readers, bounded by the budget, and backed when written."""

from __future__ import annotations

import psutil
import pytest
import torch

from etude.errors import EngineError
from etude.inference.kv import CHUNK, KVMemory, LayerShape, bytes_per_token

SHAPE = LayerShape(heads=2, key_dim=16, value_dim=8)


def memory(*, slots: int = 4, window: int = 100, budget: int = 250) -> KVMemory:
    return KVMemory([SHAPE, SHAPE], slots=slots, window=window, budget_tokens=budget, dtype=torch.float32)


def test_slots_are_taken_lowest_first_and_again_when_free() -> None:
    kv = memory()
    first, second = kv.take(10), kv.take(10)
    assert (first.index, second.index) == (0, 1)
    kv.drop(first)
    assert kv.take(5).index == 0


def test_the_budget_bounds_what_is_reserved() -> None:
    kv = memory(budget=30)
    slot = kv.take(20)
    assert kv.fits(10, new_slot=True)
    assert not kv.fits(11, new_slot=True)
    kv.resize(slot, 5)
    assert kv.fits(25, new_slot=True)
    kv.drop(slot)
    assert kv.reserved_tokens == 0


def test_no_free_slot_means_no_new_window_but_an_old_one_may_grow() -> None:
    kv = memory(slots=1)
    kv.take(10)
    assert not kv.fits(1, new_slot=True)
    assert kv.fits(1, new_slot=False)


def test_a_slot_that_others_read_is_freed_by_its_last_reader() -> None:
    kv = memory(slots=1)
    slot = kv.take(10)
    slot.refs += 1
    kv.drop(slot)
    assert not kv.fits(1, new_slot=True)
    kv.drop(slot)
    assert kv.take(1).index == 0


def test_copy_moves_the_beginning_of_every_layer() -> None:
    kv = memory()
    source, target = kv.take(10), kv.take(10)
    for array in (*kv.keys, *kv.values):
        array[source.index].normal_()
    kv.copy(source, target, 7, start=CHUNK)
    for layer in range(2):
        keys, values = kv.window_of(layer, source.index, 0, 0, CHUNK + 7)
        copied_keys, copied_values = kv.window_of(layer, target.index, 0, 0, 7)
        assert torch.equal(copied_keys, keys[:, CHUNK:])
        assert torch.equal(copied_values, values[:, CHUNK:])
        assert not kv.values[layer][target.index, :, 7:].any()
    kv.copy(source, target, 0, to=3)


def test_a_window_is_read_over_its_parent() -> None:
    kv = memory()
    parent, slot = kv.take(10), kv.take(10)
    for array in (*kv.keys, *kv.values):
        array[:2].normal_()
    keys, values = kv.window_of(1, slot.index, parent.index, CHUNK, CHUNK + 9)
    for dim in range(16):
        assert torch.equal(keys[:, :CHUNK, dim], kv.keys[1][parent.index, :, 0, dim])
        assert torch.equal(keys[:, CHUNK:, dim], kv.keys[1][slot.index, :, 0, dim, :9])
    assert torch.equal(values, torch.cat((kv.values[1][parent.index, :, :CHUNK], kv.values[1][slot.index, :, :9]), 1))


def test_wiping_clears_free_slots_alone() -> None:
    kv = memory()
    free, used = kv.take(10), kv.take(10)
    for array in (*kv.keys, *kv.values):
        array.fill_(torch.nan)
    kv.drop(free)
    kv.wipe_free()
    assert not any(array[free.index].any() for array in (*kv.keys, *kv.values))
    assert all(array[used.index].isnan().all() for array in (*kv.keys, *kv.values))


def test_address_space_is_not_memory_and_freed_pages_go_back() -> None:
    megabytes = 400
    tokens = (megabytes << 20) // bytes_per_token([SHAPE, SHAPE], torch.float32)
    process = psutil.Process()
    before = process.memory_info().rss
    kv = memory(slots=64, window=tokens, budget=tokens)  # 64 times what the budget allows
    assert process.memory_info().rss - before < 20 << 20
    slot = kv.take(tokens // 2)
    for keys, values in zip(kv.keys, kv.values, strict=True):
        keys[slot.index, :, : tokens // 2 // CHUNK] = 1.0
        values[slot.index, :, : tokens // 2] = 1.0
    grown = process.memory_info().rss - before
    assert grown > (megabytes // 2 - 20) << 20
    kv.drop(slot)
    held = kv.take(10)  # the lowest slot again, which had been written: its pages are its own now
    other = kv.take(tokens - 10)
    assert kv.reserved_tokens == tokens
    kv.drop(held)
    kv.drop(other)
    kv.take(tokens)
    assert process.memory_info().rss - before < (megabytes // 2 + 40) << 20


def test_an_impossible_size_is_a_typed_error() -> None:
    with pytest.raises(EngineError, match="address space"):
        memory(slots=1 << 20, window=1 << 40, budget=1)
