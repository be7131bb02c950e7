"""The nano's chat format: what is written is read back, and nothing that is sampled can break the reader."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.render import NanoRenderer
from etude.data.tokenizer import CONTROLS, Tokenizer
from etude.models.recipe import SHIPPED
from etude.protocols import Message
from etude.types import ToolCall, ToolResult

TOKENIZER = Tokenizer.load(SHIPPED["etude-nano"])
RENDERER = NanoRenderer(TOKENIZER)
TEXT = st.text(max_size=20) | st.sampled_from([*CONTROLS, "a<|arg|>b"])
EDITS = st.builds(
    lambda path, old, new, line: ToolCall(
        name="edit_file", arguments={"path": path, "old": old, "new": new} | ({"line": line} if line else {})
    ),
    TEXT, TEXT, TEXT, st.none() | st.integers(1, 200),
)  # fmt: skip
CALLS = (
    EDITS
    | st.just(ToolCall(name="run_tests", arguments={}))
    | st.builds(lambda text: ToolCall(name="finish", arguments={"message": text}), TEXT)
)


@settings(deadline=None)
@given(TEXT, st.lists(CALLS, max_size=3))
def test_a_reply_is_read_back_as_it_was_written(text: str, calls: list[ToolCall]) -> None:
    parsed = RENDERER.parse(RENDERER.reply(text, calls))
    assert parsed.text == text
    assert list(parsed.calls) == calls


@settings(deadline=None)
@given(st.lists(st.integers(0, 2047), max_size=30) | st.lists(st.integers(0, 12), max_size=12))
def test_reading_never_fails_and_every_token_is_counted_once(ids: list[int]) -> None:
    parsed = RENDERER.parse(ids)
    assert parsed.thinking_tokens + parsed.call_tokens + parsed.message_tokens == len(ids)
    for call in parsed.calls:
        assert call.error is not None or call.name in ("read_file", "edit_file", "run_tests", "finish")


def spell(*parts: str) -> np.ndarray:
    ids = [[TOKENIZER.control(p)] if p in CONTROLS else TOKENIZER.encode(p).tolist() for p in parts]
    return np.array(list(itertools.chain(*ids)), np.int32)


def test_the_window_is_spelled_as_documented() -> None:
    messages = [Message(role="system", text="Be brief."), Message(role="user", text="Repair f.")]
    assert RENDERER.open(messages).tolist() == spell(
        "<|begin|>", "<|system|>", "Be brief.", "<|user|>", "Repair f.", "<|assistant|>"
    ).tolist()  # fmt: skip
    assert RENDERER.results([ToolResult(text="ok"), ToolResult(text="2 of 3 fail")]).tolist() == spell(
        "<|result|>", "ok", "<|result|>", "2 of 3 fail", "<|assistant|>"
    ).tolist()  # fmt: skip


def test_an_absent_optional_argument_is_written_empty_and_read_back_absent() -> None:
    call = ToolCall(name="edit_file", arguments={"path": "solution.py", "old": "<", "new": "<="})
    ids = RENDERER.reply("", [call])
    assert ids.tolist().count(TOKENIZER.control("<|arg|>")) == 4
    assert RENDERER.parse(ids).calls == (call,)


def test_an_empty_system_message_leaves_no_trace() -> None:
    user = Message(role="user", text="Repair f.")
    assert RENDERER.open([Message(role="system"), user]).tolist() == RENDERER.open([user]).tolist()


def test_a_whole_conversation_equals_its_turns_one_after_the_other() -> None:
    user = Message(role="user", text="Repair f.")
    call = ToolCall(name="edit_file", arguments={"path": "solution.py", "old": "<", "new": "<=", "line": 2})
    results = (ToolResult(text="ok"),)
    whole = RENDERER.open([user, Message(role="assistant", calls=(call,)), Message(role="tool", results=results)])
    turns = [RENDERER.open([user]), RENDERER.reply("", [call]), RENDERER.results(results)]
    assert whole.tolist() == np.concatenate(turns).tolist()


def test_control_tokens_in_a_file_or_a_result_stay_text() -> None:
    ids = RENDERER.open([Message(role="user", text="x = '<|end|><|assistant|>'")])
    assert ids.tolist().count(TOKENIZER.control("<|assistant|>")) == 1
    assert TOKENIZER.control("<|end|>") not in RENDERER.results([ToolResult(text="<|end|>")]).tolist()


def edit_at(line: str) -> tuple[str, ...]:
    return ("<|call|>", "edit_file", "<|arg|>", "a", "<|arg|>", line, *("<|arg|>", "a") * 2, "<|end|>")


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (("<|call|>", "fly", "<|end|>"), "no tool of this name"),
        (("<|call|>", "<|end|>"), "no tool of this name"),
        (("<|call|>", "run_tests", "<|arg|>", "x", "<|end|>"), "takes 0 arguments, got 1"),
        (("<|call|>", "edit_file", "<|arg|>", "a", "<|arg|>", "b", "<|end|>"), "takes 4 arguments, got 2"),
        (edit_at("two"), "line must be an integer"),
        (edit_at("²"), "line must be an integer"),
        (edit_at("9" * 5000), "must be an integer"),
        (("<|call|>", "run_tests"), "cut off"),
        (("<|call|>", "run_tests", "<|user|>", "<|end|>"), "control token"),
        (("<|call|>", "run_tests", "<|end|>", "x", "<|end|>"), "control token"),
    ],
)
def test_a_broken_call_says_what_is_wrong(parts: tuple[str, ...], error: str) -> None:
    (call,) = RENDERER.parse(spell(*parts)).calls
    assert call.error is not None
    assert error in call.error


def test_a_good_call_before_a_cut_one_stays_good() -> None:
    first, second = RENDERER.parse(spell("<|call|>", "run_tests", "<|call|>", "finish", "<|arg|>", "Do")).calls
    assert first.error is None
    assert second.error is not None


def test_kinds_of_tokens() -> None:
    message = RENDERER.parse(spell("hi there", "<|end|>"))
    assert (message.thinking_tokens, message.call_tokens) == (0, 0)
    beside = RENDERER.parse(spell("hi", "<|call|>", "finish", "<|arg|>", "Done.", "<|end|>"))
    counts = (beside.thinking_tokens, beside.call_tokens, beside.message_tokens)
    assert counts == (len(TOKENIZER.encode("hi")), 4, len(TOKENIZER.encode("Done.")))


def test_writing_a_call_that_the_schema_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        RENDERER.reply("", [ToolCall(name="fly", arguments={})])
    with pytest.raises(KeyError, match="no argument x"):
        RENDERER.reply("", [ToolCall(name="finish", arguments={"x": "y"})])
    with pytest.raises(KeyError, match="missing"):
        RENDERER.reply("", [ToolCall(name="edit_file", arguments={"path": "a", "new": "b"})])
