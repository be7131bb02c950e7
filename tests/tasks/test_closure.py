import ast

import pytest

from etude.tasks.closure import MAX_PRELUDE_CHARS, Module, free_names, is_harmless, is_plain, strip


def module(text: str) -> Module:
    tree = ast.parse(text)
    strip(tree.body)
    return Module(tree)


def prelude(text: str, name: str) -> str | None:
    """Prelude of function `name` of the module `text`."""
    scope = module(text)
    source = ast.unparse(scope.functions[name][1])
    free = free_names(source)
    assert free is not None
    return scope.prelude(name, free)


def test_imports_constants_and_helpers_travel_in_a_working_order() -> None:
    text = '''
import re
from math import floor as down, pi
_STEP = 2 * pi
_WORD = re.compile("[a-z]+")

def _half(x: float) -> float:
    """Half of it."""
    return down(x / _STEP)

def words(text, n):
    return _WORD.findall(text)[:_half(n)]
'''
    found = prelude(text, "words")
    assert found is not None
    assert "Half of it" not in found
    assert "->" not in found
    names: dict[str, object] = {}
    exec(found + "\ndef words(text, n):\n    return _WORD.findall(text)[:_half(n)]", names)
    assert names["words"]("ab cd ef", 13) == ["ab", "cd"]  # type: ignore[operator]


def test_a_class_without_a_body_travels() -> None:
    assert (
        prelude("class Bad(ValueError):\n    'Bad.'\ndef f(x):\n    raise Bad(x)", "f")
        == "class Bad(ValueError):\n    pass"
    )


def test_a_recursive_function_does_not_need_itself() -> None:
    assert prelude("def f(n):\n    return n and f(n - 1)", "f") == ""


@pytest.mark.parametrize(
    "text",
    [
        "import os\ndef f(x):\n    return os.stat(x)",
        "from random import choice\ndef f(x):\n    return choice(x)",
        "from .near import g\ndef f(x):\n    return g(x)",
        "def f(x):\n    return open(x)",
        "def g(x):\n    return eval(x)\ndef f(x):\n    return g(x)",
        "class Frog:\n    def jump(self):\n        return 1\ndef f(x):\n    return Frog()",
        "SEEN = []\ndef g():\n    global SEEN\n    SEEN = 1\ndef f(x):\n    return SEEN",
        "if True:\n    LIMIT = 1\nelse:\n    LIMIT = 2\ndef f(x):\n    return LIMIT",
        "def f(x):\n    return missing(x)",
        f"TABLE = {list(range(400))}\ndef f(x):\n    return TABLE[x]",
    ],
)
def test_what_reaches_out_or_is_not_certain_does_not_travel(text: str) -> None:
    assert prelude(text, "f") is None


def test_a_long_prelude_does_not_travel() -> None:
    text = "".join(f"A{i} = {'x' * 300!r}\n" for i in range(6)) + "def f(x):\n    return A0 + A1 + A2 + A3 + A4 + A5"
    assert len(text) > MAX_PRELUDE_CHARS
    assert prelude(text, "f") is None


@pytest.mark.parametrize(
    ("source", "harmless"),
    [
        ("def f(x):\n    return x + 1", True),
        ("def f(x):\n    import re\n    return re.escape(x)", True),
        ("def f(x):\n    import os\n    return os.name", False),
        ("def f(x):\n    global y\n    y = x", False),
        ("def f(x):\n    return x.__globals__", False),
        ("def f(x):\n    return x.now()", False),
    ],
)
def test_harm_is_seen_in_syntax(source: str, harmless: bool) -> None:
    assert is_harmless(ast.parse(source)) is harmless


def test_attributes_of_foreign_objects_are_not_plain() -> None:
    assert is_plain(ast.parse("x.strip().split()"), frozenset())
    assert is_plain(ast.parse("math.gcd(a, b)"), frozenset({"math"}))
    assert not is_plain(ast.parse("math.gcd(a, b)"), frozenset())
    assert not is_plain(ast.parse("node.left"), frozenset())


def test_stripping_leaves_no_docstring_annotation_or_decorator_at_any_depth() -> None:
    tree = ast.parse(
        '''
@cache
def f(a: int, *rest: str, k: float = 1.0) -> int:
    """Doc."""
    x: int = 2
    if a:
        y: int
    @wraps(f)
    def g(b: int) -> None:
        "Only a docstring."
    return x
'''
    )
    strip(tree.body)
    expected = (
        "def f(a, *rest, k=1.0):\n    x = 2\n    if a:\n        pass\n\n    def g(b):\n        pass\n    return x"
    )
    assert ast.unparse(tree) == expected


def test_free_names_are_those_of_inner_scopes_too() -> None:
    assert free_names("def f(x, y=LIMIT):\n    return [g(i, x) for i in y] + list(lambda: h)") == {
        "LIMIT",
        "g",
        "list",
        "h",
    }
    assert free_names("def f(:") is None
