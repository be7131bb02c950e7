import ast
import random
import textwrap
from pathlib import Path

import pytest

from etude.tasks.faults import HELDOUT_KIND, KINDS
from etude.tasks.harvest import read_module
from etude.tasks.mutate import ALL_KINDS, DELETED_KIND, TRAIN_KINDS, mutate
from etude.tasks.packages import STDLIB

SAMPLES: dict[str, tuple[str, str]] = {
    "comparison-boundary": ("return a < b", "return a <= b"),
    "comparison-opposite": ("return a in b", "return a not in b"),
    "arithmetic-operator": ("return a + b", "return a - b"),
    "augmented-assignment": ("a += b", "a -= b"),
    "off-by-one": ("return f(a, 3)", "return f(a, 4)"),
    "lost-sign": ("return -a", "return a"),
    "boolean-operator": ("return a and b", "return a or b"),
    "boolean-constant": ("return f(a, True)", "return f(a, False)"),
    "negated-condition": ("return 1 if f(a) else 2", "return 1 if not f(a) else 2"),
    "dropped-not": ("return not a", "return a"),
    "dropped-term": ("return a + b", "return a"),
    "swapped-arguments": ("return f(a, b)", "return f(b, a)"),
    "swapped-operands": ("return a - b", "return b - a"),
    "wrong-variable": ("return f(a)", "return f(b)"),
    "wrong-index": ("return a[0]", "return a[1]"),
    "wrong-slice": ("return a[1:]", "return a[:]"),
    "range-bound": ("return range(a)", "return range(a - 1)"),
    "sibling-call": ("return a.lstrip()", "return a.rstrip()"),
    "dropped-call": ("return sorted(a)", "return a"),
    "dropped-argument": ("return f(a, key=b)", "return f(a)"),
    "missing-return": ("return a", "a"),
    "wrong-return": ("return a", "return b"),
    "initial-value": ("c = 0", "c = -1"),
    "string-constant": ("return a.split(', ')", "return a.split(',')"),
    "shortcut": ("return a if f(a) else b", "return b"),
}


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    text = "\n".join(Path(module.__file__).read_text() for module in (textwrap, random, ast))
    return [function.source for function in read_module(text, module="m", package=STDLIB)]


@pytest.mark.parametrize("kind", SAMPLES)
def test_each_kind_makes_the_fault_it_is_named_for(kind: str) -> None:
    before, after = SAMPLES[kind]
    made = [mutation.new_line.strip() for mutation in mutate(f"def g(a, b):\n    {before}", random.Random(0), [kind])]
    assert after in made


def test_loop_exits_defaults_and_statements_are_changed_too() -> None:
    source = "def g(a, b=None):\n    for x in a:\n        if x:\n            break\n    a.pop()\n    return b"
    made = {(m.kind, m.line, m.new_line.strip()) for m in mutate(source, random.Random(0))}
    assert {
        ("loop-exit", 4, "continue"), ("default-value", 1, "def g(a, b=0):"), (DELETED_KIND, 5, "")
    } <= made  # fmt: skip
    assert set(SAMPLES) | {"loop-exit", "default-value"} == set(KINDS)


def test_every_mutation_changes_one_line_and_compiles(corpus: list[str]) -> None:
    rng = random.Random(1)
    for source in corpus:
        before = source.split("\n")
        for mutation in mutate(source, rng, ALL_KINDS, limit=12):
            compile(mutation.source, "m", "exec")
            after = mutation.source.split("\n")
            assert before[mutation.line - 1] == mutation.old_line != mutation.new_line
            assert after[: mutation.line - 1] == before[: mutation.line - 1]
            if mutation.kind == DELETED_KIND:
                assert after[mutation.line - 1 :] == before[mutation.line :]
            else:
                assert after[mutation.line - 1 :] == [mutation.new_line, *before[mutation.line :]]
                assert ast.unparse(ast.parse(mutation.source)) == mutation.source


def test_mutations_of_a_function_are_distinct(corpus: list[str]) -> None:
    for source in corpus[:30]:
        made = [mutation.source for mutation in mutate(source, random.Random(2), ALL_KINDS)]
        assert len(set(made)) == len(made)
        assert source not in made


def test_the_heldout_kind_is_not_made_unless_asked_for() -> None:
    source = "def g(a, b):\n    c = a - b\n    return c // b"
    assert HELDOUT_KIND not in TRAIN_KINDS
    assert HELDOUT_KIND not in {mutation.kind for mutation in mutate(source, random.Random(0))}
    (first, second) = mutate(source, random.Random(0), [HELDOUT_KIND])
    assert {first.new_line.strip(), second.new_line.strip()} == {"c = b - a", "return b // c"}


def test_no_training_kind_makes_the_heldout_fault(corpus: list[str]) -> None:
    for source in corpus:
        heldout = {mutation.source for mutation in mutate(source, random.Random(0), [HELDOUT_KIND])}
        if heldout:
            assert heldout.isdisjoint(mutation.source for mutation in mutate(source, random.Random(0)))


def test_a_limit_brings_different_kinds() -> None:
    source = "def g(a, b):\n    if a < b and b:\n        return a + 1\n    return b"
    made = mutate(source, random.Random(3), limit=5)
    assert len({mutation.kind for mutation in made}) == 5


def test_the_order_comes_from_the_generator_alone() -> None:
    source = "def g(a, b):\n    if a < b and b:\n        return a + 1\n    return b"
    assert mutate(source, random.Random(4)) == mutate(source, random.Random(4))
    assert mutate(source, random.Random(4)) != mutate(source, random.Random(5))


def test_an_elif_stays_an_elif() -> None:
    source = "def g(a, b):\n    if a:\n        return 1\n    elif a < b:\n        return 2"
    made = [mutation for mutation in mutate(source, random.Random(0), ["comparison-boundary"])]
    assert [mutation.new_line for mutation in made] == ["    elif a <= b:"]


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no such kind of fault: typo"):
        mutate("def g(a):\n    return a", random.Random(0), ["typo"])


def test_a_fault_that_compiles_with_a_warning_is_made_quietly() -> None:
    made = mutate("def g(a):\n    return a is not None", random.Random(0), ["comparison-opposite", "wrong-variable"])
    assert [mutation.new_line.strip() for mutation in made] == ["return a is None"]
    made = mutate("def g(a):\n    return str(a)(1) is a", random.Random(0), ["dropped-call", "off-by-one"])
    assert made
