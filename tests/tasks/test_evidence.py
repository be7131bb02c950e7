"""What a function's text tells about its parameters."""

from __future__ import annotations

import pytest

from etude.tasks import evidence
from etude.tasks.evidence import Hints


def hints(source: str, prelude: str = "") -> list[Hints]:
    return [parameter.hints for parameter in evidence.read(prelude, source).parameters]


def share(found: Hints, kinds: tuple[str, ...]) -> float:
    """Of all draws, how many are of these kinds."""
    return sum(found.weights[kind] for kind in kinds) / sum(found.weights.values())


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("def f(q):\n    return q.items()", evidence.DICTS),
        ("def f(q):\n    return q['key']", evidence.DICTS),
        ("def f(q):\n    return q.splitlines()", evidence.STRS),
        ("def f(q=''):\n    return q", evidence.STRS),
        ("def f(q):\n    return q << 2", ("int",)),
        ("def f(q):\n    return q(1)", ("callable",)),
        ("def f(q):\n    return q.strftime('%d')", ("moment",)),
        ("def f(q):\n    return ','.join(q)", ("strs", "str_tuple")),
        ("def f(q):\n    return -q", ("int", "float")),
        ("def f(q):\n    for a, b in q:\n        yield a", ("pairs",)),
        ("def f(q):\n    q.append(3)", evidence.LISTS),
        ("def f(q):\n    return q.colour", ("object",)),
    ],
)
def test_the_use_of_a_parameter_tells_its_kind(source: str, kinds: tuple[str, ...]) -> None:
    assert share(hints(source)[0], kinds) > 2 * share(Hints(), kinds)
    assert share(hints(source)[0], kinds) > 0.4


def test_the_elements_of_a_parameter_are_known_by_their_own_use() -> None:
    (found,) = hints("def f(q):\n    return [x.strip() for x in q]")
    assert found.element is not None
    assert share(found.element, evidence.STRS) > 0.6


def test_keys_attributes_and_lengths_are_noted() -> None:
    first, second, third = hints(
        "def f(a, b, c):\n    x, y, z = c\n    return a['red'] + a.get('blue', 0) + b.size + b.area()"
    )
    assert first.keys == {"red", "blue"}
    assert second.attributes == {"size": False, "area": True}
    assert third.length == 3


def test_constants_of_function_and_prelude_are_noted() -> None:
    found = evidence.read("UNITS = ('kB', 'MB')", "def f(q):\n    return q.endswith('bit') or q == 17")
    assert set(found.strings) == {"kB", "MB", "bit"}
    assert found.integers == (17,)


def test_every_style_of_parameter_is_listed() -> None:
    found = evidence.read("", "def f(a, b=1, *c, d, e=2, **g):\n    return a")
    assert [(p.name, p.style, p.optional) for p in found.parameters] == [
        ("a", "plain", False), ("b", "plain", True), ("c", "star", False), ("d", "keyword", False),
        ("e", "keyword", True), ("g", "double_star", False),
    ]  # fmt: skip


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(SyntaxError):
        evidence.read("", "x = 1")
