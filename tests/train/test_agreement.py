from __future__ import annotations

import numpy as np

from etude.train.agreement import agreement_row, live_tokens
from etude.types import KVEpoch, Origin, Run, Sample, Version

OLD, NEW = Version(incarnation=1, n=3, step=3), Version(incarnation=1, n=4, step=4)


def sample(versions: list[tuple[int, Version]], *epochs: tuple[int, list[tuple[int, Version]]]) -> Sample:
    def runs(pairs: list[tuple[int, Version]]) -> tuple[Run, ...]:
        return tuple(Run(start=start, version=version) for start, version in pairs)

    mask = np.array([False, False, True, True, True, False, True, True])
    return Sample(
        ids=np.zeros(8, np.int32), mask=mask, logprobs=np.zeros(8, np.float32), advantage=1.0, versions=runs(versions),
        kv_epochs=tuple(KVEpoch(first=first, runs=runs(pairs)) for first, pairs in epochs), routes=None,
        origin=Origin(key="g", member=0, context=0),
    )  # fmt: skip


def live(one: Sample) -> list[int]:
    return np.flatnonzero(live_tokens(one, lambda version: version == NEW)).tolist()


def test_all_sampled_tokens_of_the_current_version_with_fresh_kv_are_live() -> None:
    assert live(sample([(0, NEW)], (0, [(0, NEW)]))) == [2, 3, 4, 6, 7]


def test_tokens_of_an_older_version_are_not_live() -> None:
    assert live(sample([(0, OLD)], (0, [(0, NEW)]))) == []


def test_one_old_entry_of_kv_spoils_every_later_token_but_not_the_token_at_it() -> None:
    assert live(sample([(0, NEW)], (0, [(0, NEW), (3, OLD), (4, NEW)]))) == [2, 3]


def test_tokens_after_a_swap_keep_older_kv_and_are_not_live() -> None:
    assert live(sample([(0, OLD), (4, NEW)], (0, [(0, OLD), (4, NEW)]))) == []


def test_a_prefill_anew_opens_an_epoch_from_which_tokens_are_live_again() -> None:
    swapped = [(0, OLD), (4, NEW)]
    assert live(sample(swapped, (0, swapped), (6, [(0, NEW)]))) == [6, 7]


def test_without_a_record_of_kv_nothing_is_live() -> None:
    assert live(sample([(0, NEW)])) == []


def test_the_two_numbers_are_never_merged_and_carry_their_counts() -> None:
    row = agreement_row(np.array([-1.0, -2.0, -3.0]), np.array([-1.5, -2.0, -3.0]), np.array([True, False, False]))
    assert row["mismatch_live_count"] == 1
    assert row["mismatch_live_mean"] == 0.5
    assert row["off_policy_ratio_count"] == 2
    assert row["off_policy_ratio_p99"] == 1.0
    assert "mismatch_live_mean" not in agreement_row(np.ones(1), np.ones(1), np.array([False]))
