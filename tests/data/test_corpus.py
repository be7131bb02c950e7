"""Documents of planted faults: their edits lead back, are small, and are spelled as an episode is."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import frames
from etude.agent.prompts import opening as agent_opening
from etude.code.edit import apply_edit
from etude.data import corpus
from etude.data.corpus import FILE, FIX, UNTRAINED, Corpus, document, documents, join, opening, plant, smallest_edit
from etude.data.render import NanoRenderer
from etude.data.tokenizer import Tokenizer
from etude.models.recipe import SHIPPED
from etude.tasks.mutate import mutate
from etude.types import IOChecks, Task

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
