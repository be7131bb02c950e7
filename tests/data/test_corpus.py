"""Documents of planted faults: their edits lead back, are small, and are spelled as an episode is."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import frames
from etude.agent.prompts import opening as agent_opening
from etude.code.edit import apply_edit
from etude.data import corpus
from etude.data.corpus import (
    FILE,
    FIX,
    UNTRAINED,
    Corpus,
    Document,
    document,
    documents,
    join,
    opening,
    plant,
    smallest_edit,
)
from etude.data.render import NanoRenderer
from etude.data.tokenizer import Tokenizer
from etude.models.recipe import SHIPPED
from etude.tasks.mutate import mutate
from etude.types import IOChecks, Task, ToolCall

TOKENIZER = Tokenizer.load(SHIPPED["etude-nano"])
RENDERER = NanoRenderer(TOKENIZER)
SOURCE = """def total(values, limit):
    found = 0
    for index, value in enumerate(values):
        if value < limit and index >= 10:
            found += value
    return found"""
LINES = st.text(alphabet="ab <=+(),.12", min_size=1, max_size=14).filter(str.strip)


@dataclass(frozen=True)
class Fault:
    line: int
    old_line: str
    new_line: str


@dataclass(frozen=True)
class Function:
    name: str
    source: str
    prelude: str = ""


def faults(source: str, rng: random.Random, limit: int) -> Sequence[Fault]:
    return mutate(source, rng, limit=limit)


@pytest.mark.parametrize(
    ("wrong", "right", "edit"),
    [
        ("    if a < b:", "    if a <= b:", (" <", " <=")),
        ("    x = f(a, b)", "    x = f(b, a)", ("a, b", "b, a")),
        ("    return x", "    return x + 1", ("x", "x + 1")),
        ("    a, b = a, b", "    a, b = b, a", ("a, b", "b, a")),
        ("    x", "    return x", ("x", "return x")),
        ("    not x or not y", "    not x or y", (" or not y", " or y")),
    ],
)
def test_an_edit_is_as_small_as_its_tokens_allow(wrong: str, right: str, edit: tuple[str, str]) -> None:
    old, new = smallest_edit(TOKENIZER, wrong, right)
    assert wrong.count(old) == 1
    assert wrong.replace(old, new) == right
    assert len(TOKENIZER.encode(old)) <= len(TOKENIZER.encode(edit[0])) + 1


@settings(deadline=None)
@given(LINES, LINES)
def test_any_change_of_a_line_has_an_edit(wrong: str, right: str) -> None:
    if wrong == right:
        return
    old, new = smallest_edit(TOKENIZER, wrong, right)
    assert apply_edit(f"first\n{wrong}\n", old, new, 2) == f"first\n{right}\n"


@pytest.mark.parametrize("seed", range(20))
def test_edits_of_several_faults_lead_back_in_order(seed: int) -> None:
    found = mutate(SOURCE, random.Random(seed))
    chosen = [found[0], next(fault for fault in found if abs(fault.line - found[0].line) > 1)]
    right, broken, edits = plant(TOKENIZER, "import math", SOURCE, chosen)
    assert right == f"import math\n\n{SOURCE}\n"
    text = broken
    for edit in edits:
        assert text != right
        text = apply_edit(text, edit.old, edit.new, edit.line)
    assert text == right


@pytest.mark.parametrize("line", [2, 5, 6])
def test_a_removed_line_comes_back(line: int) -> None:
    lines = SOURCE.split("\n")
    fault = Fault(line=line, old_line=lines[line - 1], new_line="")
    right, broken, (edit,) = plant(TOKENIZER, "", SOURCE, [fault])
    assert lines[line - 1] not in broken.split("\n")
    assert apply_edit(broken, edit.old, edit.new, edit.line) == right


def test_a_document_opens_as_an_episode_does() -> None:
    task = Task.make(prompt="Repair total.", workspace={"solution.py": SOURCE}, category="repair", source={},
                     verifier=IOChecks(path="solution.py", checks=()))  # fmt: skip
    assert opening("total", {"solution.py": SOURCE}) == agent_opening(task)


def test_marks_tell_the_file_from_the_repair() -> None:
    _, broken, edits = plant(TOKENIZER, "", SOURCE, mutate(SOURCE, random.Random(0), limit=1))
    made = document(RENDERER, "total", broken, edits)
    opened = len(RENDERER.open(opening("total", {"solution.py": broken})))
    assert made.marks[0] == UNTRAINED
    assert set(made.marks[1:opened]) == {FILE}
    assert set(made.marks[opened:]) == {FIX}
    (call,) = RENDERER.parse(made.ids[opened:]).calls
    assert call.arguments["old"] == edits[0].old


def replies(made: Document) -> list[list[ToolCall]]:
    """Calls of each reply."""
    assistant, end = TOKENIZER.control("<|assistant|>"), TOKENIZER.control("<|end|>")
    found, ids = [], made.ids.tolist()
    for place in (n for n, number in enumerate(ids) if number == assistant):
        stop = ids.index(end, place)
        found.append(list(RENDERER.parse(ids[place + 1 : stop + 1]).calls))
    return found


def shown(made: Document) -> str:
    """The file of the opening."""
    text = TOKENIZER.decode(made.ids).split("solution.py\n", 1)[1].split("<|assistant|>")[0]
    return "".join(line.split("\t", 1)[1] for line in text.splitlines(keepends=True))


def test_wrong_edits_come_first_and_each_is_undone_before_what_follows() -> None:
    function = Function("total", SOURCE, prelude="LIMIT = 10\n")
    counts = set()
    for _, made in documents(RENDERER, [function], faults, passes=12, max_faults=1, max_tokens=400, seed=0,
                             wrongs=(1.0, 1.0, 1.0)):  # fmt: skip
        text = broken = shown(made)
        *wrongs, last = replies(made)
        counts.add(len(wrongs))
        for number, calls in enumerate([*wrongs, last]):
            if number:
                text = apply_edit(text, **without_path(calls.pop(0)))
                assert text == broken, "not undone"
            text = apply_edit(text, **without_path(calls.pop(0)))
            assert text != broken
        assert text == "LIMIT = 10\n\n" + SOURCE + "\n"
    assert counts == {0, 1, 2}


def without_path(call: ToolCall) -> dict[str, Any]:
    return {name: value for name, value in call.arguments.items() if name != "path"}


def test_a_wrong_edit_is_not_learned_and_what_undoes_it_is() -> None:
    first, wrong = mutate(SOURCE, random.Random(0), limit=1)[0], Fault(2, "    found = 0", "    found = 1")
    _, broken, edits = plant(TOKENIZER, "", SOURCE, [first])
    ((there, back),) = corpus.wrong_edits(TOKENIZER, broken, 0, [wrong], 2)
    made = document(RENDERER, "total", broken, edits, [(there, back)])
    ids, named = made.ids.tolist(), 4  # call, name, argument, path: trying an edit is right
    for edit, mark in ((there, UNTRAINED), (back, FIX)):
        call = RENDERER.reply("", [corpus.edit_call(edit)])[:-1].tolist()
        start = next(n for n in range(len(ids)) if ids[n : n + len(call)] == call)
        assert set(made.marks[start : start + named]) == {FIX}
        assert set(made.marks[start + named : start + len(call)]) == {mark}


def test_documents_depend_on_seed_and_function_alone_and_passes_differ() -> None:
    function, other = Function("total", SOURCE), Function("twice", "def twice(a):\n    return a * 2")

    def made(*functions: Function, seed: int = 0) -> list[str]:
        found = documents(RENDERER, functions, faults, passes=3, max_faults=2, max_tokens=400, seed=seed)
        return [TOKENIZER.decode(one.ids) for _, one in found]

    alone = made(function)
    assert len(set(alone)) == 3
    assert made(other, function)[-3:] == alone
    assert made(function, seed=1) != alone


def test_long_documents_are_left_out() -> None:
    assert not list(
        documents(RENDERER, [Function("total", SOURCE)], faults, passes=2, max_faults=1, max_tokens=20, seed=0)
    )


def test_a_corpus_survives_a_file(tmp_path: Path) -> None:
    made = [one for _, one in documents(RENDERER, [Function("total", SOURCE)], faults, passes=3, max_faults=1,
                                        max_tokens=400, seed=0)]  # fmt: skip
    frames.write_file(tmp_path / "corpus.bin", join(made, "here"))
    read = frames.read_file(tmp_path / "corpus.bin", Corpus)
    assert len(read) == 3
    for number, one in enumerate(made):
        assert np.array_equal(read.ids[read.starts[number] : read.starts[number + 1]], one.ids)
    assert len(corpus.join([], "none")) == 0
