import hashlib
import zipfile
from pathlib import Path

import pytest

from etude.errors import TaskError
from etude.tasks.harvest import Function, body_key, harvest, read, read_module, write
from etude.tasks.packages import Package

POND = Package(name="pond", version="1.0", licence="MIT", role="train", sha256="00" * 32)


def functions(text: str) -> list[Function]:
    return list(read_module(text, module="pond.frog", package=POND))


def packed(folder: Path, name: str, text: str) -> Package:
    path = folder / f"{name}-1.0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(name=name, version="1.0", licence="MIT", role="train", sha256=digest)


def test_a_function_is_read_without_its_authors_habits() -> None:
    (found,) = functions(
        '''
import math

@cached
def area(r: float, *, scale: float = 1.0) -> float:
    """Area of a circle."""
    # the formula
    squared = (r**2)
    return (math.pi
            * squared * scale)
'''
    )
    assert found.source == "def area(r, *, scale=1.0):\n    squared = r ** 2\n    return math.pi * squared * scale"
    assert (found.qualname, found.lines, found.callable, found.prelude) == ("area", 3, True, "import math")


def test_a_method_is_kept_but_not_callable() -> None:
    (found,) = functions("class Frog:\n    def jump(self, n):\n        self.x += n\n        return self.x")
    assert (found.qualname, found.name, found.callable) == ("Frog.jump", "jump", False)
    assert found.source.startswith("def jump(self, n):")


def test_a_method_that_never_uses_its_instance_becomes_a_function() -> None:
    (found,) = functions("class Frog:\n    def half(self, n):\n        n = n - n % 2\n        return n // 2")
    assert found.source.startswith("def half(n):")
    assert found.callable


def test_a_method_without_use_of_its_instance_that_cannot_be_called_keeps_it() -> None:
    (found,) = functions("class Frog:\n    def half(self, n):\n        n = n.legs\n        return n // 2")
    assert found.source.startswith("def half(self, n):")
    assert not found.callable


def test_a_static_method_is_callable() -> None:
    (found,) = functions("class Frog:\n    @staticmethod\n    def half(n):\n        n = n + 0\n        return n // 2")
    assert found.callable


@pytest.mark.parametrize(
    "text",
    [
        "def one_liner(x): return x",
        "def long(x):\n" + "    x += 1\n" * 20,
        "def wide(x):\n    y = x\n    return y" + " + x" * 40,
        "def foreign(x):\n    y = 'é'\n    return x + y",
        "@overload\ndef stub(x):\n    y = 1\n    return y",
        "def broken(x:\n",
    ],
)
def test_what_is_too_short_long_wide_or_foreign_is_left_out(text: str) -> None:
    assert functions(text) == []


@pytest.mark.parametrize(
    "body",
    [
        "    with open(x) as f:\n        return f.read()",
        "    y = x.legs\n    return y",
        "    y = yield_of(x)\n    return y",
        "    global z\n    z = x",
    ],
)
def test_a_function_that_needs_the_world_is_kept_but_not_callable(body: str) -> None:
    (found,) = functions(f"def f(x):\n{body}")
    assert not found.callable
    assert found.prelude == ""


def test_a_body_of_one_line_is_kept_when_it_is_callable_and_says_something() -> None:
    (found,) = functions(
        "def even(values):\n    return [x for x in values if x % 2 == 0]\n"
        "def legs(values):\n    return [x.legs for x in values if x]\n"
        "def same(value):\n    return value\n"
    )
    assert (found.name, found.lines) == ("even", 2)


def test_a_function_that_does_not_compile_alone_is_left_out() -> None:
    text = "def f(x):\n    y: int\n    def g():\n        nonlocal y\n        y = x\n    return g"
    assert functions(text) == []


def test_a_function_without_parameters_is_not_callable() -> None:
    (found,) = functions("def f():\n    x = 1\n    return x")
    assert not found.callable


def test_copies_under_other_names_have_one_key() -> None:
    one = body_key("def f(a, b):\n    for i in a:\n        b += i\n    return f(b, [])")
    assert one == body_key("def g(x, y):\n    for k in x:\n        y += k\n    return g(y, [])")


@pytest.mark.parametrize(
    "other",
    [
        "def f(a, b):\n    return a.x + 2",
        "def f(a, b):\n    return a.y + 1",
        "def f(a, b):\n    return b.x + 1",
        "def f(a, b=0):\n    return a.x + 1",
        "def f(a, b):\n    return c.x + 1",
        "def f(a, b):\n    return a.x + 1.0",
    ],
)
def test_constants_attributes_globals_and_which_local_make_another_key(other: str) -> None:
    assert body_key("def f(a, b):\n    return a.x + 1") != body_key(other)


def test_an_expression_nested_too_deep_does_not_stop_the_harvest() -> None:
    deep = "+".join(["1"] * 500)
    text = f"TABLE = {deep}\ndef f(a):\n    a = TABLE\n    return a\ndef g(a):\n    a = {deep}\n    return a"
    (found,) = functions(text + "\n" + "def h(a):\n    a = a + 1\n    return a")[1:]
    assert found.name == "h"


def test_the_first_package_with_a_body_keeps_it(tmp_path: Path) -> None:
    first = packed(tmp_path, "ant", "def f(a):\n    a = a + 1\n    return a")
    second = packed(tmp_path, "bee", "def g(b):\n    b = b + 1\n    return b\ndef h(b):\n    b = b + 2\n    return b")
    assert [(row.package, row.name) for row in harvest([first, second], tmp_path)] == [("ant", "f"), ("bee", "h")]


@pytest.mark.slow
def test_workers_do_not_change_the_harvest(tmp_path: Path) -> None:
    first = packed(tmp_path, "ant", "def f(a):\n    a = a + 1\n    return a")
    second = packed(tmp_path, "bee", "def h(b):\n    b = b + 2\n    return b")
    assert list(harvest([first, second], tmp_path, workers=2)) == list(harvest([first, second], tmp_path))


def test_functions_are_read_back_with_their_split(tmp_path: Path) -> None:
    rows = functions("def f(a):\n    a = a + 1\n    return a\ndef g(a):\n    a = a + 2\n    return a")
    path = tmp_path / "new" / "functions.jsonl.zst"
    assert write(rows, path) == 2
    assert list(read(path)) == [(rows[0], ""), (rows[1], "")]
    assert write(rows, path, {rows[1].body_key: "rl"}) == 1
    assert list(read(path)) == [(rows[1], "rl")]
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("data", [None, b"", b"not zstandard", "cut"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, data: bytes | str | None) -> None:
    path = tmp_path / "functions.jsonl.zst"
    if data == "cut":
        write(functions("def f(a):\n    a = a + 1\n    return a"), path)
        path.write_bytes(path.read_bytes()[:-9])
    elif isinstance(data, bytes):
        path.write_bytes(data)
    with pytest.raises(TaskError, match="functions cannot be read"):
        list(read(path))
