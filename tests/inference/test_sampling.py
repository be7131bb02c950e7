"""Sampling: the right token for a given uniform number, and log-probs of the full distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import ask
from etude.inference.sampling import PLAIN, sample, sampling_rows

LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0]])


@pytest.mark.parametrize("uniform", [0.0, 0.05, 0.0872, 0.3, 0.5, 0.9, 0.99, 0.9999999, np.nextafter(1.0, 0.0)])
def test_a_uniform_number_picks_by_the_cumulative_distribution(uniform: float) -> None:
    tokens, logprobs = sample(LOGITS.clone(), np.array([uniform]), PLAIN)
    probabilities = LOGITS[0].double().softmax(-1)
    expected = min(int((probabilities.cumsum(-1) <= np.float32(uniform)).sum()), 3)
    assert tokens.tolist() == [expected]
    assert logprobs[0] == pytest.approx(float(probabilities[expected].log()), abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-80, 80), min_size=2, max_size=9), st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_never_comes(values: list[float], uniform: float) -> None:
    logits = torch.tensor([values, values], dtype=torch.float32)
    logits[1, 0] = -torch.inf
    tokens, logprobs = sample(logits, np.array([uniform, uniform]), PLAIN)
    assert tokens[1] != 0
    assert np.isfinite(logprobs).all()


def test_rows_are_sampled_with_their_own_settings() -> None:
    requests = [
        ask([1], temperature=1.0),
        ask([1], temperature=0.5),
        ask([1], temperature=0.0),
        ask([1], temperature=1.0, banned_ids=(2, 1)),
    ]
    tokens, logprobs = sample(LOGITS.repeat(4, 1), np.full(4, 0.4), sampling_rows(requests))
    base, sharp = LOGITS[0].log_softmax(-1), (LOGITS[0] / 0.5).log_softmax(-1)
    banned = LOGITS[0][[0, 3]].log_softmax(-1)
    assert tokens.tolist() == [2, 2, 2, 0]
    assert logprobs.tolist() == pytest.approx(
        [float(value) for value in (base[2], sharp[2], base[2], banned[0])], abs=1e-6
    )


def test_a_row_that_is_not_finite_says_so_and_leaves_the_others_alone() -> None:
    logits = torch.cat([LOGITS, torch.full((1, 4), torch.nan)])
    tokens, logprobs = sample(logits, np.array([0.5, 0.5]), PLAIN)
    assert np.isfinite(logprobs).tolist() == [True, False]
    assert 0 <= tokens[1] < 4


def test_16_bit_logits_are_sampled_in_float32() -> None:
    _, logprobs = sample(LOGITS.bfloat16(), np.array([0.5]), PLAIN)
    assert logprobs.dtype == np.float32
    assert logprobs[0] == pytest.approx(float(LOGITS[0].log_softmax(-1)[2]), abs=1e-6)
