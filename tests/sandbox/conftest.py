"""`host`: a pool for the tests of a module, once with cgroups where they can be made, once with rlimits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from etude.sandbox import limits
from sandbox.machine import RECIPE, Machine, machine


@pytest.fixture(scope="module", params=["cgroups", "rlimits"])
def host(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "rlimits":
            patch.setattr(limits, "find", lambda: "the test says so")
        elif isinstance(limits.find(), str):
            pytest.skip(f"cgroups: {limits.find()}")
        with machine(RECIPE) as made:
            yield made
