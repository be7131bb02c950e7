"""Hostile requests: a small dose of tests/serve/hostile.py, which runs ten thousand by hand."""

from __future__ import annotations

import pytest

from serve.hostile import attack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_hostile_requests_find_nothing() -> None:
    found = attack(600, seed=1, examples=4)
    assert found.wrong == []
    assert found.sent >= 600
    assert found.statuses["200"] > 50
