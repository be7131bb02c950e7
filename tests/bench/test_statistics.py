import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.bench.statistics import clustered_difference, paired_difference, pass_at_k


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    attempts = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(attempts, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    rate, n, k = 0.3, 8, 4
    expected = sum(math.comb(n, c) * rate**c * (1 - rate) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - rate) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, c, k)


def test_a_paired_difference_by_hand() -> None:
    interval = paired_difference([0.0, 0.5, 0.5, 1.0], [0.5, 0.5, 1.0, 1.0])
    half = 1.96 * math.sqrt(0.25 / 3) / math.sqrt(4)
    assert interval.value == 0.25
    assert (interval.low, interval.high) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-4)


def test_pairing_cancels_what_makes_tasks_differ() -> None:
    before = np.linspace(0, 0.9, 50)
    interval = paired_difference(before, before + 0.1)
    assert (interval.low, interval.high) == pytest.approx((0.1, 0.1))


def test_one_task_proves_nothing() -> None:
    assert paired_difference([0.0], [1.0]).low == -math.inf


def test_the_paired_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        rates = rng.uniform(0, 0.9, 100)
        before, after = rng.binomial(8, rates) / 8, rng.binomial(8, rates + 0.1) / 8
        interval = paired_difference(before, after)
        hits += interval.low <= 0.1 <= interval.high
    assert 0.92 <= hits / 400 <= 0.98


def test_clusters_that_agree_within_widen_the_interval() -> None:
    clusters = np.repeat(np.arange(25), 8)
    effect = np.random.default_rng(0).normal(0.1, 0.2, 25)[clusters]
    before = np.zeros(200)
    over_tasks, over_clusters = paired_difference(before, effect), clustered_difference(before, effect, list(clusters))
    assert over_clusters.value == pytest.approx(over_tasks.value)
    assert over_clusters.high - over_clusters.low > 2 * (over_tasks.high - over_tasks.low)


def test_clusters_of_one_agree_with_the_normal_interval() -> None:
    after = np.random.default_rng(1).normal(0.1, 0.3, 300)
    normal = paired_difference(np.zeros(300), after)
    bootstrap = clustered_difference(np.zeros(300), after, list(range(300)))
    assert (bootstrap.low, bootstrap.high) == pytest.approx((normal.low, normal.high), abs=0.005)


def test_one_seed_fixes_the_bootstrap() -> None:
    after = list(np.random.default_rng(2).normal(0.1, 0.3, 40))
    first, second, other = (
        clustered_difference([0.0] * 40, after, ["a", "b", "c", "d"] * 10, seed=seed, num_resamples=500)
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_what_is_not_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs are needed"):
        paired_difference([0.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="pairs are needed"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="2 tasks have 1 clusters"):
        clustered_difference([0.0, 0.0], [1.0, 1.0], ["a"])
