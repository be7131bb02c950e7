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
        ("def f(given):\n    return given.items()", evidence.DICTS),
        ("def f(given):\n    return given['key']", evidence.DICTS),
        ("def f(given):\n    return given.splitlines()", evidence.STRS),
        ("def f(given=''):\n    return given", evidence.STRS),
        ("def f(given):\n    return given << 2", ("int",)),
        ("def f(given):\n    return given(1)", ("callable",)),
        ("def f(given):\n    return given.strftime('%d')", ("moment",)),
        ("def f(given):\n    return ','.join(given)", ("strs", "str_tuple")),
        ("def f(given):\n    return -given", ("int", "float")),
        ("def f(given):\n    for a, b in given:\n        yield a", ("pairs",)),
        ("def f(given):\n    given.append(3)", evidence.LISTS),
        ("def f(given):\n    return given.colour", ("object",)),
    ],
)
def test_the_use_of_a_parameter_tells_its_kind(source: str, kinds: tuple[str, ...]) -> None:
    assert share(hints(source)[0], kinds) > 2 * share(Hints(), kinds)
    assert share(hints(source)[0], kinds) > 0.4


def test_the_elements_of_a_parameter_are_known_by_their_own_use() -> None:
    (found,) = hints("def f(given):\n    return [x.strip() for x in given]")
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
    found = evidence.read("UNITS = ('kB', 'MB')", "def f(given):\n    return given.endswith('bit') or given == 17")
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
