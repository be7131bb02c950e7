"""Expert transcripts: every reply does what it says, failures are real, and mistakes are not learned."""

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from etude.code.edit import EditError, apply_edit
from etude.data.corpus import FILE, FIX, UNTRAINED, Document
from etude.data.recipe import TranscriptSettings
from etude.data.render import NanoRenderer
from etude.data.tokenizer import Tokenizer
from etude.models.recipe import SHIPPED
from etude.tasks.isolation import Prober
from etude.tasks.transcripts import transcript
from tasks.repair_tasks import FAULTY, RIGHT, entry

RENDERER = NanoRenderer(Tokenizer.load(SHIPPED["etude-nano"]))
CALM = TranscriptSettings(read_first=0, test_first=0, wrong_edits=(1.0,), give_up=0, test_after=1)


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    with Prober(hash_seed=1) as running:
        yield running


def write(prober: Prober, settings: TranscriptSettings, seed: int = 0) -> Document:
    made = transcript(RENDERER, entry().task, RIGHT, prober, random.Random(seed), settings)
    assert made is not None
    return made


def turns(made: Document) -> list[tuple[list, list[str]]]:
    """(calls, results) of each reply."""
    tokenizer = RENDERER.tokenizer
    text = tokenizer.decode(made.ids)
    found = []
    for part in text.split("<|assistant|>")[1:]:
        reply, _, rest = part.partition("<|end|>")
        pieces = re.split(r"(<\|call\|>|<\|arg\|>)", reply)
        ids = [
            np.array([tokenizer.control(piece)]) if piece.startswith("<|") else tokenizer.encode(piece)
            for piece in pieces
        ]
        ended = np.array([tokenizer.control("<|end|>")])
        found.append((list(RENDERER.parse(np.concatenate([*ids, ended])).calls), rest.split("<|result|>")[1:]))
    return found


def answered(text: str, arguments: dict) -> tuple[str, str]:
    """The text after an edit, and what the tool says."""
    try:
        return apply_edit(text, **arguments), "ok"
    except EditError as error:
        return text, f"error: {error}"


def replay(made: Document) -> str:
    """The file after all calls, checking each answer that can be checked."""
    text = FAULTY
    for calls, results in turns(made):
        for call, result in zip(calls, results or [None] * len(calls), strict=True):
            assert call.error is None
            if call.name == "edit_file":
                arguments = {key: value for key, value in call.arguments.items() if key != "path"}
                text, answer = answered(text, arguments)
                assert result in (answer, None)
            if call.name == "run_tests":
                assert (result == "ok") == (text == RIGHT) or "fail" not in result
    return text


def test_the_plain_transcript_repairs_tests_and_finishes(prober: Prober) -> None:
    made = write(prober, CALM)
    assert [[call.name for call in calls] for calls, _ in turns(made)] == [["edit_file", "run_tests"], ["finish"]]
    assert replay(made) == RIGHT
    assert set(made.marks.tolist()) == {UNTRAINED, FILE, FIX}


def test_without_a_test_it_finishes_in_the_same_reply(prober: Prober) -> None:
    quick = TranscriptSettings(read_first=0, test_first=0, wrong_edits=(1.0,), test_after=0)
    assert [[call.name for call in calls] for calls, _ in turns(write(prober, quick))] == [["edit_file", "finish"]]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_goes_wrong_first_the_file_is_right_in_the_end(prober: Prober, seed: int) -> None:
    wild = TranscriptSettings(read_first=0.5, test_first=0.5, wrong_edits=(0, 1, 1, 1), give_up=0, test_after=1)
    assert replay(write(prober, wild, seed)) == RIGHT


def test_wrong_edits_are_shown_with_their_real_failure_and_not_learned(prober: Prober) -> None:
    made = write(prober, TranscriptSettings(read_first=0, test_first=0, wrong_edits=(0, 1), give_up=0, test_after=1), 3)
    (first, results), *_ = turns(made)
    assert [call.name for call in first] == ["edit_file", "run_tests"]
    assert results[1].endswith("fail")
    assert "expected 5" in results[1]
    call = RENDERER.reply("", [first[0]])[:-1]
    start = next(n for n in range(len(made.ids)) if made.ids[n : n + len(call)].tolist() == call.tolist())
    named = 4  # call, name, argument, path: trying an edit is right
    assert set(made.marks[start : start + named]) == {FIX}
    assert set(made.marks[start + named : start + len(call)]) == {UNTRAINED}
    assert set(made.marks[start + len(call) : start + len(call) + 2]) == {FIX}


@pytest.mark.parametrize("seed", range(8))
def test_every_wrong_edit_is_undone_before_the_next(prober: Prober, seed: int) -> None:
    wild = TranscriptSettings(read_first=0, test_first=0, wrong_edits=(0, 1, 1), give_up=0, test_after=1)
    text = FAULTY
    for number, (calls, _) in enumerate(turns(write(prober, wild, seed))):
        edits = [call.arguments for call in calls if call.name == "edit_file"]
        for place, arguments in enumerate(edits):
            text = apply_edit(text, **{key: value for key, value in arguments.items() if key != "path"})
            if number and not place:
                assert text == FAULTY
