"""Checks for a function: calls with the values that the original gives, and for a fault those that tell it apart.

    function --evidence, inputs--> calls --original, traced--> candidates --other process, other hash seed--> Pool
    Pool + faulty source --run--> outcomes --choose--> IOChecks (a few visible, the others only grade)

Expected values come from running the original, never from reasoning about it. What is not the same in two processes,
what takes long and what says nothing (all values equal, only errors) is left out.

What it does not do: make faults (`mutate`) or run anything outside the isolation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from etude.tasks import evidence
from etude.tasks.inputs import MAX_CALL_CHARS, Candidate, Search
from etude.tasks.isolation import Observed, Prober
from etude.types import IOCheck

MAX_EXPECTED_CHARS = 200
SHORT_CHARS = 60
"""What run_tests shows in full; visible checks are short where there is a choice."""
ORIGINAL_LINES = 5_000
"""Lines that one call of the original may execute: well under 50 ms, the grader's limit is ten times more."""
FAULTY_LINES = 20_000
ROUNDS, DRAWS = 3, 44
"""Of the search: 132 calls a function at most."""
MAX_POOL = 28
MIN_POOL = 9
"""Two visible checks and six hidden ones must be left, and one may be lost to the second run."""
MAX_RAISING_SHARE = 0.25
MAX_COMMON_SHARE = 0.7
"""Of the pool that may give one and the same value; more such calls are dropped."""
_FOREIGN_ERRORS = frozenset(
    f"raises {name}"
    for name in (
        "TypeError", "AttributeError", "NameError", "UnboundLocalError", "RecursionError", "MemoryError",
        "AssertionError", "SyntaxError", "SystemExit", "KeyboardInterrupt", "ImportError", "OSError",
        "ModuleNotFoundError", "FileNotFoundError", "SystemError", "NotImplementedError", "PermissionError",
    )
)  # fmt: skip
"""What a call raises when its arguments are of the wrong kind, or when the machine has a say."""
_ARGUMENTS = (
    "1", "'abc'", "2, 3", "[3, 1]", "", "'a', 'b'", "5", "{'a': 1}", "lambda x: x", "0", "'X y'", "[]", "-2.5",
)  # fmt: skip
"""Tried on functions that a function returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A call of the original, the canonical text of its value and the line transitions it took (a set of bits)."""

    call: str
    expected: str
    arcs: int
    plausible: float
    """How well its arguments fit what the text tells about the parameters; see `inputs.Candidate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Why a function makes no tasks: one word, for counting."""

    reason: str


def gather(
    name: str, prelude: str, source: str, probers: Sequence[Prober], rng: random.Random
) -> tuple[Probe, ...] | Rejected:
    """Up to MAX_POOL diverse probes of a function that gave equal values in every process, in random order.

    The first prober searches, the others confirm, calls in reverse; all must have different hash seeds. A function with
    one unstable call is left out: it depends on something, and the calls that agreed may have agreed by chance.
    """
    try:
        search = Search(name, evidence.read(prelude, source), rng)
    except (SyntaxError, RecursionError):
        return Rejected(reason="syntax")
    module = module_text(prelude, source)
    found = _search(search, module, probers[0])
    if sum(not _raises(probe) for probe in found) < MIN_POOL - 2:
        return Rejected(reason="inputs")
    pool = _diverse(found, rng)
    if len(pool) < MIN_POOL or len({probe.expected for probe in pool if not _raises(probe)}) < 2:
        return Rejected(reason="trivial")
    for prober in probers[1:]:
        again = prober.run([module], [[probe.call for probe in reversed(pool)]], lines=FAULTY_LINES, fresh=True)
        if [entry.text for entry in reversed(again[0])] != [probe.expected for probe in pool]:
            return Rejected(reason="unstable")
    rng.shuffle(pool)
    return tuple(pool)


def _raises(probe: Probe) -> bool:
    return probe.expected.startswith("raises ")


def module_text(prelude: str, source: str) -> str:
    """The text of solution.py."""
    return (prelude.rstrip("\n") + "\n\n" if prelude.strip() else "") + source.rstrip("\n") + "\n"


def _search(search: Search, module: str, prober: Prober) -> list[Probe]:
    """Probes of the original."""
    found: dict[str, Probe] = {}
    seen_arcs = 0
    seen_texts: set[str] = set()
    for _ in range(ROUNDS):
        drawn = search.draw(DRAWS)
        answer = prober.run([module], [[candidate.call for candidate in drawn]], lines=ORIGINAL_LINES)
        wrapped: list[tuple[Candidate, str]] = []
        in_place: list[tuple[Candidate, str]] = []
        for candidate, seen in zip(drawn, answer[0], strict=True):
            works = seen.text not in ("timeout", "died") and seen.text not in _FOREIGN_ERRORS
            new = works and (seen.arcs & ~seen_arcs != 0 or seen.text not in seen_texts)
            search.learn(candidate, works=works, new=new)
            if not works:
                continue
            seen_arcs |= seen.arcs
            seen_texts.add(seen.text)
            if seen.wrap:
                wrapped.append((candidate, _wrapped(candidate.call, seen.wrap, search.rng)))
            elif seen.text == "None" and candidate.in_place:
                in_place.append((candidate, candidate.in_place))
            else:
                _keep(found, candidate, candidate.call, seen)
        if wrapped or in_place:
            again = wrapped + in_place
            answer = prober.run([module], [[call for _, call in again]], lines=ORIGINAL_LINES)
            results = list(zip(again, answer[0], strict=True))
            if all(seen.text == candidate.target for (candidate, _), seen in results[len(wrapped) :]):
                # It changes nothing: what was passed says nothing about it, None says as much.
                results[len(wrapped) :] = [((c, c.call), Observed("None", "", 0)) for c, _ in in_place]
            for (candidate, call), seen in results:
                _keep(found, candidate, call, seen)
    return list(found.values())


def _wrapped(call: str, wrap: str, rng: random.Random) -> str:
    """An expression for plain data out of the call's value."""
    if wrap == "iterator":
        return f"[x for x, _ in zip({call}, range(9))]"
    return f"{call}({rng.choice(_ARGUMENTS)})" if wrap == "call" else f"{wrap}({call})"


def _keep(found: dict[str, Probe], candidate: Candidate, call: str, seen: Observed) -> None:
    text = seen.text
    if len(call) > MAX_CALL_CHARS or len(text) > MAX_EXPECTED_CHARS or text in ("timeout", "too long", "died"):
        return
    if "object " in text or " at 0x" in text or text in _FOREIGN_ERRORS:
        return
    found[call] = Probe(call=call, expected=text, arcs=seen.arcs, plausible=candidate.plausible)


def _diverse(found: Sequence[Probe], rng: random.Random) -> list[Probe]:
    """A greedy choice: new line transitions, then rare values, then short and plausible calls; few errors."""
    left = list(found)
    rng.shuffle(left)
    left.sort(key=lambda probe: (_is_long(probe), -round(probe.plausible, 1)))
    chosen: list[Probe] = []
    texts: Counter[str] = Counter()
    arcs = raising = 0
    while left and len(chosen) < MAX_POOL:
        best = max(left, key=lambda probe: ((probe.arcs & ~arcs).bit_count(), -texts[probe.expected]))
        left.remove(best)
        if _raises(best):
            if raising + 1 > MAX_RAISING_SHARE * MAX_POOL:
                continue
            raising += 1
        chosen.append(best)
        arcs |= best.arcs
        texts[best.expected] += 1
    common, count = texts.most_common(1)[0]
    spare = count - int(MAX_COMMON_SHARE / (1 - MAX_COMMON_SHARE) * (len(chosen) - count))
    for probe in [probe for probe in reversed(chosen) if probe.expected == common][: max(0, spare)]:
        chosen.remove(probe)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a faulty source did on a pool: per probe `pass`, `fail` or `timeout`."""

    outcomes: tuple[str, ...]

    @property
    def kills(self) -> int:
        return self.outcomes.count("fail")

    @property
    def passes(self) -> int:
        return self.outcomes.count("pass")


def try_faults(prelude: str, sources: Sequence[str], pool: Sequence[Probe], prober: Prober) -> list[Verdict]:
    """A verdict for each faulty source."""
    calls = [probe.call for probe in pool]
    answer = prober.run(
        [module_text(prelude, source) for source in sources], [calls] * len(sources), lines=FAULTY_LINES, fresh=True
    )
    verdicts = []
    for entries in answer:
        outcomes = []
        for probe, seen in zip(pool, entries, strict=True):
            same = "pass" if seen.text == probe.expected else "fail"
            outcomes.append("timeout" if seen.text in ("timeout", "died") else same)
        verdicts.append(Verdict(outcomes=tuple(outcomes)))
    return verdicts


def choose(
    pool: Sequence[Probe], verdict: Verdict, rng: random.Random, *, visible: int, hidden: int
) -> tuple[IOCheck, ...] | None:
    """At most `visible` checks to show and `hidden` ones to grade with, from what does not run out of time.

    At least one of each kind fails on the faulty source and the hidden ones contain calls that pass, if there are any;
    None where that cannot be had, or fewer than 2 and 6 are left.
    """
    kills = [probe for probe, outcome in zip(pool, verdict.outcomes, strict=True) if outcome == "fail"]
    passes = [probe for probe, outcome in zip(pool, verdict.outcomes, strict=True) if outcome == "pass"]
    if len(kills) < 2 or len(kills) + len(passes) < 8:
        return None
    kills, passes = _spread(kills, rng), _spread(passes, rng)
    num_shown = min(visible, len(kills) + len(passes) - 6)
    shown_kills = max(1, min(len(kills) - 1, (num_shown + 1) // 2))
    shown_passes = min(num_shown - shown_kills, max(0, len(passes) - 2))
    shown = kills[:shown_kills] + passes[:shown_passes]
    if len(shown) < 2:
        shown = kills[: min(num_shown, len(kills) - 1)] if len(kills) > 2 else kills[:1] + passes[:1]
    rest_kills = [probe for probe in kills if probe not in shown]
    rest_passes = [probe for probe in passes if probe not in shown]
    num_kills = max(1, min(len(rest_kills), max(hidden // 2, hidden - len(rest_passes))))
    graded = rest_kills[:num_kills] + rest_passes[: hidden - num_kills]
    if len(shown) < 2 or len(graded) < 6:
        return None
    rng.shuffle(shown)
    rng.shuffle(graded)
    return tuple(
        IOCheck(call=probe.call, expected=probe.expected, visible=probe in shown) for probe in (*shown, *graded)
    )


def _spread(probes: Sequence[Probe], rng: random.Random) -> list[Probe]:
    """In random order, but every value once before any comes twice, and short ones before long ones among those."""
    shuffled = rng.sample(list(probes), len(probes))
    seen: Counter[str] = Counter()
    ranks = {}
    for probe in sorted(shuffled, key=_is_long):
        ranks[probe.call] = (seen[probe.expected], _is_long(probe))
        seen[probe.expected] += 1
    return sorted(shuffled, key=lambda probe: ranks[probe.call])


def _is_long(probe: Probe) -> bool:
    return len(probe.call) > SHORT_CHARS or len(probe.expected) > SHORT_CHARS
