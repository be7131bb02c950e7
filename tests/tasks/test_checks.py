"""Checks for functions: what is kept, what is rejected, and how a task's checks are chosen."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from etude.tasks.checks import (
    MAX_EXPECTED_CHARS,
    MAX_POOL,
    MIN_POOL,
    Probe,
    Rejected,
    Verdict,
    choose,
    gather,
    module_text,
    try_faults,
)
from etude.tasks.inputs import MAX_CALL_CHARS
from etude.tasks.isolation import Prober

CHUNK = """def chunk(seq, size):
    out = []
    for i in range(0, len(seq), size):
        out.append(seq[i:i + size])
    return out"""


@pytest.fixture(scope="module")
def probers() -> Iterator[tuple[Prober, ...]]:
    with Prober(hash_seed=1) as one, Prober(hash_seed=2) as two, Prober(hash_seed=3) as three:
        yield one, two, three


def gathered(
    probers: tuple[Prober, ...], source: str, prelude: str = "", seed: int = 0
) -> tuple[Probe, ...] | Rejected:
    name = source.split("(")[0].removeprefix("def ")
    return gather(name, prelude, source, probers, random.Random(seed))


def pool_of(probers: tuple[Prober, ...], source: str, prelude: str = "") -> tuple[Probe, ...]:
    pool = gathered(probers, source, prelude)
    assert not isinstance(pool, Rejected), pool.reason
    return pool


def test_expected_values_are_those_of_the_original(probers: tuple[Prober, ...]) -> None:
    namespace: dict[str, object] = {}
    exec(CHUNK, namespace)
    pool = pool_of(probers, CHUNK)
    assert MIN_POOL <= len(pool) <= MAX_POOL
    for probe in pool:
        assert len(probe.call) <= MAX_CALL_CHARS
        assert len(probe.expected) <= MAX_EXPECTED_CHARS
        if not probe.expected.startswith("raises "):
            assert repr(eval(probe.call, namespace)) == probe.expected


def test_the_same_seed_gathers_the_same_probes(probers: tuple[Prober, ...]) -> None:
    assert gathered(probers, CHUNK, seed=5) == gathered(probers, CHUNK, seed=5)


@pytest.mark.parametrize(
    ("prelude", "source", "reason"),
    [
        ("", "def f(x):\n    return 7", "trivial"),
        ("import random", "def f(x):\n    return [x, random.random()]", "unstable"),
        ("", "def f(words):\n    return list({str(w) for w in words} | {'a', 'b', 'c', 'd'})", "unstable"),
        ("import os", "def f(x):\n    os._exit(0)", "inputs"),
        ("", "def f(x):\n    return x.spectral_density_matrix(2)[0].inverse", "inputs"),
        ("", "def f(x):\n    return object()", "inputs"),
        ("", "def f(n):\n    while True:\n        n = n", "inputs"),
    ],
)
def test_what_makes_no_checks_is_rejected(probers: tuple[Prober, ...], prelude: str, source: str, reason: str) -> None:
    assert gathered(probers, source, prelude) == Rejected(reason=reason)


def test_iterators_are_checked_by_what_they_give(probers: tuple[Prober, ...]) -> None:
    endless = "def f(start, step):\n    n = start\n    while True:\n        yield n\n        n += step"
    assert all("zip(f(" in probe.call for probe in pool_of(probers, endless) if not probe.expected.startswith("raises"))


def test_functions_that_are_returned_are_called(probers: tuple[Prober, ...]) -> None:
    pool = pool_of(probers, "def f(n):\n    def inner(x, *rest):\n        return [n, x]\n    return inner")
    assert any(probe.call.endswith(")('abc')") for probe in pool)


def test_functions_that_change_their_argument_are_checked_by_it(probers: tuple[Prober, ...]) -> None:
    pool = pool_of(probers, "def f(items):\n    items.sort()\n    items.append(len(items))")
    assert any(probe.call.endswith(" or it") and probe.expected != "None" for probe in pool)


def test_objects_with_the_attributes_that_are_read_can_be_passed(probers: tuple[Prober, ...]) -> None:
    assert pool_of(probers, "def f(box):\n    return [box.width, box.height, box.label]")


def test_faults_are_told_from_what_changes_nothing(probers: tuple[Prober, ...]) -> None:
    pool = pool_of(probers, CHUNK)
    faulty = CHUNK.replace("range(0,", "range(1,")
    endless = CHUNK.replace("        out.append", "        while size: out = out\n        out.append")
    verdicts = try_faults("", [CHUNK, faulty, endless], pool, probers[0])
    assert verdicts[0].kills == 0
    assert verdicts[1].kills > 2
    assert "timeout" in verdicts[2].outcomes


def test_a_module_is_prelude_blank_line_and_function() -> None:
    assert module_text("import re\n", "def f():\n    pass") == "import re\n\ndef f():\n    pass\n"
    assert module_text("", "def f():\n    pass\n") == "def f():\n    pass\n"


def made_pool(*outcomes: str) -> tuple[tuple[Probe, ...], Verdict]:
    pool = tuple(
        Probe(call=f"f({number})", expected=str(number), arcs=1, plausible=1.0) for number in range(len(outcomes))
    )
    return pool, Verdict(outcomes=outcomes)


@pytest.mark.parametrize(("kills", "passes"), [(2, 6), (2, 26), (26, 2), (28, 0), (8, 0), (3, 5), (14, 14), (2, 7)])
def test_both_kinds_of_checks_notice_the_fault(kills: int, passes: int) -> None:
    pool, verdict = made_pool(*["fail"] * kills, *["pass"] * passes)
    failing = {probe.call for probe in pool[:kills]}
    for seed in range(30):
        checks = choose(pool, verdict, random.Random(seed), visible=4, hidden=12)
        assert checks is not None
        shown = {check.call for check in checks if check.visible}
        graded = {check.call for check in checks if not check.visible}
        assert 2 <= len(shown) <= 4
        assert 6 <= len(graded) <= 12
        assert not shown & graded
        assert shown & failing
        assert graded & failing
        assert graded - failing or passes < 2


@pytest.mark.parametrize("outcomes", [["fail"] + ["pass"] * 20, ["fail"] * 7, ["timeout"] * 20, ["pass"] * 20])
def test_too_little_makes_no_task(outcomes: list[str]) -> None:
    pool, verdict = made_pool(*outcomes)
    assert choose(pool, verdict, random.Random(0), visible=4, hidden=12) is None


def test_a_value_that_many_calls_give_does_not_crowd_out_the_others() -> None:
    pool = tuple(Probe(call=f"f({n})", expected=str(n) if n < 6 else "None", arcs=1, plausible=1.0) for n in range(26))
    checks = choose(pool, Verdict(outcomes=("fail",) * 26), random.Random(0), visible=4, hidden=12)
    assert checks is not None
    assert {check.expected for check in checks} == {"None", "0", "1", "2", "3", "4", "5"}


def test_calls_that_run_out_of_time_are_not_chosen() -> None:
    pool, verdict = made_pool(*["timeout"] * 5, *["fail"] * 5, *["pass"] * 5)
    checks = choose(pool, verdict, random.Random(0), visible=4, hidden=12)
    assert checks is not None
    assert not {check.call for check in checks} & {probe.call for probe in pool[:5]}
