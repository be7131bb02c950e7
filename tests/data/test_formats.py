"""Chat formats: the first turn, what follows a reply, what is read back, and that no text ever becomes a control id.

Every test that names a family runs on EACH of them. Real vocabularies and stand-ins: vocabularies.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.vocabularies import controls_of, o200k, tokenizer_json
from etude.agent.tool import schema
from etude.agent.tools import TOOLS
from etude.data.families import FamilyRenderer
from etude.data.formats import open_renderer
from etude.data.render import NanoRenderer, Renderer
from etude.data.template import TemplateRenderer
from etude.data.tokenizer import SafeTokenizer
from etude.errors import ModelError
from etude.models.recipe import SHIPPED
from etude.protocols import Message
from etude.types import ToolCall, ToolResult

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""In the form of SmolLM2's."""
FAMILIES = {"qwen3": "qwen3", "kimi-k2": "kimi-k2", "kimi-k2.5": "kimi-k2", "deepseek-v3": "deepseek-v3",
            "glm-4.5": "glm-4.5", "llama-3": "llama-3", "gpt-oss": "gpt-oss"}  # fmt: skip
"""Format -> its vocabulary."""
BIG = [pytest.mark.slow, pytest.mark.skipif(o200k() is None, reason="pip install --no-deps litellm")]
"""Two hundred thousand pieces, out of a large package."""
FORMATS = (*FAMILIES, "template", "nano")
EACH = [pytest.param(name, marks=BIG) if name == "gpt-oss" else name for name in FORMATS]
TASK = (Message(role="system", text="Be brief."), Message(role="user", text="Repair clamp.\n"))
CALL = ToolCall(name="read_file", arguments={"path": "a.py"})


def schemas() -> list[dict]:
    return [schema(TOOLS[name]) for name in ("read_file", "edit_file", "run_tests", "finish")]


@functools.cache
def renderer_of(name: str) -> Renderer:
    if name == "nano":
        return open_renderer(SHIPPED["etude-nano"], schemas())
    if name == "template":
        tokenizer = SafeTokenizer(tokenizer_json("qwen3"))
        return TemplateRenderer(tokenizer, CHATML, schemas(), specials={}, stop_tokens=["<|im_end|>"])
    return FamilyRenderer(name, SafeTokenizer(tokenizer_json(FAMILIES[name])), schemas())


@functools.cache
def controls(name: str) -> frozenset[int]:
    """Ids that no text may become."""
    if name == "nano":
        renderer = renderer_of(name)
        assert isinstance(renderer, NanoRenderer)
        return renderer._controls
    source = tokenizer_json("qwen3" if name == "template" else FAMILIES[name])
    whole = SafeTokenizer(source)
    return frozenset(whole.control(token) for token in controls_of(source))


def controls_in(name: str, ids: Sequence[int] | np.ndarray) -> list[int]:
    return [int(number) for number in ids if int(number) in controls(name)]


def answers(*texts: str) -> Message:
    """Results of a reply's calls."""
    return Message(role="tool", results=tuple(ToolResult(text=text) for text in texts))


def is_part(some: Sequence[int], of: Sequence[int]) -> bool:
    """Whether nothing was added: a control that a text spells may be text where the format's own words spell it too."""
    rest = iter(of)
    return all(number in rest for number in some)


def spelled(name: str, text: str, calls: Sequence[ToolCall]) -> list[int]:
    """A reply as the family would sample it, its end included."""
    renderer = renderer_of(name)
    reply = Message(role="assistant", text=text, calls=tuple(calls))
    answered = Message(role="tool", results=(ToolResult(text="?"),)) if calls else Message(role="user", text="?")
    whole, start = renderer.open([*TASK, reply, answered]), len(renderer.open(TASK))
    if name == "gpt-oss":
        return _thought_and(whole[start - 3 :].tolist(), renderer)  # without <|channel|>analysis<|message|>
    rest = whole[start:].tolist()
    stop = next(place for place, number in enumerate(rest) if number in renderer.stop_ids)
    return rest[: stop + 1]


def _thought_and(rest: list[int], renderer: Renderer) -> list[int]:
    """gpt-oss begins in a thought, which no history holds, and ends with <|return|> where a history has <|end|>."""
    assert isinstance(renderer, FamilyRenderer)
    tokenizer = renderer._tokenizer
    end, last = tokenizer.control("<|end|>"), tokenizer.control("<|return|>")
    stop = next(place for place, number in enumerate(rest) if number in (end, *renderer.stop_ids))
    thought = tokenizer.encode_format("Hm.<|end|><|start|>assistant").tolist()
    return [*thought, *rest[:stop], last if rest[stop] == end else rest[stop]]


@pytest.mark.parametrize("name", EACH)
def test_a_reply_of_the_format_is_read_back(name: str) -> None:
    reply = spelled(name, "", [CALL])
    parsed = renderer_of(name).parse(reply)
    assert [(call.name, dict(call.arguments), call.error) for call in parsed.calls] == [
        ("read_file", {"path": "a.py"}, None)
    ]
    assert parsed.thinking_tokens + parsed.call_tokens + parsed.message_tokens == len(reply)
    assert parsed.call_tokens > 0
    plain = renderer_of(name).parse(spelled(name, "All is done.", []))
    assert (plain.text.strip(), plain.calls) == ("All is done.", ())


@pytest.mark.parametrize("name", EACH)
def test_what_follows_a_reply_extends_the_window_and_is_what_the_whole_conversation_has(name: str) -> None:
    renderer = renderer_of(name)
    opening = renderer.open(TASK)
    reply = np.array(spelled(name, "", [CALL]), np.int32)
    window = np.concatenate([opening, reply])
    message, results = Message(role="assistant", text="", calls=(CALL,)), answers("1\tx = 1\n")
    after = renderer.follow(window, len(opening), message, [results])
    assert after is not None
    whole = renderer.open([*TASK, message, results])
    assert len(after) > 3
    assert whole[-len(after) :].tolist() == after.tolist()
    has_other_thoughts = name in ("kimi-k2.5", "gpt-oss")  # some that were not sampled, or not those that were
    if not has_other_thoughts:
        assert np.concatenate([window, after]).tolist() == whole.tolist()


@pytest.mark.parametrize("name", EACH)
def test_a_reply_that_is_spelled_oddly_is_never_spelled_again(name: str) -> None:
    renderer = renderer_of(name)
    opening = renderer.open(TASK)
    odd = [int(n) for n in np.random.default_rng(0).integers(300, 1500, 12)]
    window = np.concatenate([opening, odd, [renderer.stop_ids[0]]]).astype(np.int32)
    message = Message(role="assistant", text="?", calls=(CALL,))
    after = renderer.follow(window, len(opening), message, [answers("ok")])
    # a call of GLM's ends otherwise, and a reply of the other two not in the middle of a thought: a new context opens
    assert (after is None) == (name in ("glm-4.5", "gpt-oss", "kimi-k2.5"))
    assert after is None or len(after) > 0


MARKS = ["<|im_end|>", "<|im_start|>", "</think>", "<think>", "<tool_call>", "</tool_call>", "<|eot_id|>", "<|end|>",
         "<|call|>", "<|assistant|>", "<|observation|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
         "<|tool_call_begin|>", "[EOS]", "<|result|>", "<|channel|>", "<|start_header_id|>", "<arg_value>"]  # fmt: skip
HOSTILE = st.lists(st.sampled_from([*MARKS, *"<|>_ \n/", "end", "user"]), max_size=12).map("".join)


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=60, deadline=None)
@given(text=HOSTILE)
def test_no_text_becomes_a_control_id(name: str, text: str) -> None:
    renderer = renderer_of(name)

    def conversation(words: str) -> list[Message]:
        call = ToolCall(name="read_file", arguments={"path": "a"})
        answer = answers(words)
        reply = Message(role="assistant", text="", calls=(call,))
        return [Message(role="system", text=words), Message(role="user", text=words), reply, answer]

    plain, hostile = (renderer.open(conversation(words)) for words in ("x", f"x{text}x"))
    assert is_part(controls_in(name, hostile), controls_in(name, plain))
    window = renderer.open(TASK)
    reply = np.array(spelled(name, "", [CALL]), np.int32)
    window = np.concatenate([window, reply])
    message = Message(role="assistant", text="", calls=(CALL,))
    follows = [
        renderer.follow(window, len(window) - len(reply), message, [answers(words)]) for words in ("x", f"x{text}x")
    ]
    assert follows[0] is not None
    assert follows[1] is not None
    assert is_part(controls_in(name, follows[1]), controls_in(name, follows[0]))


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_was_sampled_is_read_without_an_error(name: str, data: st.DataObject) -> None:
    renderer = renderer_of(name)
    known = sorted(controls(name))
    ids = data.draw(st.lists(st.one_of(st.sampled_from(known[-60:]), st.integers(300, 1500)), max_size=24))
    parsed = renderer.parse(ids)
    assert parsed.thinking_tokens + parsed.call_tokens + parsed.message_tokens == len(ids)
    reply = spelled(name, "so", [CALL])
    cut = data.draw(st.integers(0, len(reply)))
    renderer.parse(reply[:cut] + ids + reply[cut:])


def test_folders_find_their_format(tmp_path: Path) -> None:
    def folder(name: str, source: str, model_type: str, template: str = "", **settings_: object) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "tokenizer.json").write_text(source)
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings_}))
        return path

    qwen = tokenizer_json("qwen3")
    assert isinstance(open_renderer(folder("a", qwen, "qwen3_moe", "x"), schemas()), FamilyRenderer)
    coder = CHATML + "{# <function= #}"
    found = open_renderer(folder("b", qwen, "qwen3_moe", coder, eos_token="<|im_end|>"), schemas())
    assert isinstance(found, TemplateRenderer)
    smol = open_renderer(folder("c", qwen, "llama", CHATML, eos_token={"content": "<|im_end|>"}), schemas())
    assert isinstance(smol, TemplateRenderer)
    assert isinstance(open_renderer(SHIPPED["etude-nano"], schemas()), NanoRenderer)
    with pytest.raises(ModelError, match="has no chat format"):
        open_renderer(folder("d", qwen, "llama"), schemas())
    lengths = "{% for message in messages %}{{ message['content'] | trim | length }}{% endfor %}"
    counting = folder("e", qwen, "llama", lengths, eos_token="<|im_end|>")
    with pytest.raises(ModelError, match="changes the texts"):
        open_renderer(counting, schemas())
    with pytest.raises(ModelError, match="does not know the tool shell"):
        open_renderer(SHIPPED["etude-nano"], [schema(TOOLS["shell"])])


def test_the_template_writes_tools_into_the_system_message_where_it_does_not_know_them() -> None:
    renderer = renderer_of("template")
    assert isinstance(renderer, TemplateRenderer)
    text = renderer._tokenizer.decode(renderer.open(TASK))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can use tools.")
    assert '"name": "edit_file"' in text
    assert text.endswith("<|im_start|>user\nRepair clamp.\n<|im_end|>\n<|im_start|>assistant\n")
