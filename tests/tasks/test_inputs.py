"""Calls drawn for functions."""

from __future__ import annotations

import ast
import random

import pytest

from etude.tasks import evidence
from etude.tasks.inputs import MAX_CALL_CHARS, Search

STYLES = "def f(a, b=1, *c, d, e=2, **g):\n    return (a, b, c, d, e, g)"


def search(source: str, seed: int = 0) -> Search:
    return Search("f", evidence.read("", source), random.Random(seed))


def test_the_same_seed_draws_the_same_calls() -> None:
    source = "def f(text, n):\n    return text * n"
    one, two, other = ([c.call for c in search(source, seed).draw(50)] for seed in (3, 3, 4))
    assert one == two
    assert one != other


def test_calls_are_distinct_short_expressions_that_fit_the_signature() -> None:
    namespace: dict[str, object] = {}
    exec(STYLES, namespace)
    drawn = search(STYLES).draw(300)
    assert len({candidate.call for candidate in drawn}) == len(drawn) > 250
    for candidate in drawn:
        assert len(candidate.call) <= MAX_CALL_CHARS
        eval(candidate.call, namespace)


def test_the_form_for_functions_that_change_their_argument_gives_it() -> None:
    namespace: dict[str, object] = {}
    exec("def f(items, k):\n    [x.clear() for x in (items, k) if isinstance(x, list)]", namespace)
    forms = [c.in_place for c in search("def f(items, k):\n    items.sort()").draw(60) if c.target.startswith("[")]
    assert forms
    for form in forms:
        assert eval(form, namespace) == []


def test_kinds_that_work_are_drawn_more_often() -> None:
    source = "def f(thing):\n    return thing"
    learned = search(source)
    for candidate in learned.draw(150):
        learned.learn(candidate, works=candidate.arguments[0].kind == "bytes", new=False)

    def share(drawn: Search) -> float:
        calls = drawn.draw(100)
        return sum(c.arguments[0].kind == "bytes" for c in calls) / len(calls)

    assert share(learned) > 2 * share(search(source))


def test_strings_are_built_around_the_constants_of_the_function() -> None:
    drawn = search("def f(s):\n    return s.partition('=>')").draw(150)
    assert sum("=>" in candidate.call for candidate in drawn) > 20


def test_keys_that_the_body_looks_up_are_there() -> None:
    drawn = search("def f(d):\n    return d['red'] + d['blue']").draw(150)
    assert sum("'red'" in candidate.call and "'blue'" in candidate.call for candidate in drawn) > 30


@pytest.mark.parametrize("kind", evidence.KINDS)
def test_every_kind_makes_an_expression(kind: str) -> None:
    drawn = search("def f(q):\n    return q.size + q.area() + q['k']")
    hints = drawn.parameters[0].hints
    for _ in range(200):
        text = drawn.values.make(kind, hints)
        ast.parse(text, mode="eval")
        eval(text)
