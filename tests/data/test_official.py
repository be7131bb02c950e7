"""The first turn of each family, beside the template that its makers published (slow: needs the package `trl`'s files).

    pip install --no-deps trl

Where the two differ on purpose, the test says how. Kimi's template is in no package.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from data.test_formats import BIG, TASK, answers, renderer_of, schemas
from data.vocabularies import tokenizer_json
from etude.data.families import FamilyRenderer
from etude.data.template import TemplateRenderer
from etude.data.tokenizer import SafeTokenizer
from etude.protocols import Message
from etude.types import ToolCall

SPEC = find_spec("trl")
TEMPLATES = Path(SPEC.origin).parent / "chat_templates" if SPEC and SPEC.origin else None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(TEMPLATES is None, reason="pip install --no-deps trl")]
PLAIN = [
    {"name": name, "description": "One line.", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}
    for name in ("read_file", "finish")
]  # fmt: skip
"""Of more, harmony, which is the reference of gpt-oss, makes other lines than the template does."""


def template(name: str) -> str:
    assert TEMPLATES is not None
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def official(name: str, messages: tuple[Message, ...], tools: list[dict[str, Any]], **given: str) -> str:
    """As transformers' `apply_chat_template` writes it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": message.role, "content": message.text} for message in messages]
    wrapped = [{"type": "function", "function": tool} for tool in tools]
    rendered, _ = render_jinja_template(
        conversations=[chat], tools=wrapped, chat_template=template(name), add_generation_prompt=True, **given
    )
    return str(rendered[0])


@pytest.mark.parametrize("messages", [TASK, TASK[1:]], ids=["system", "no system"])
@pytest.mark.parametrize(
    ("family", "name", "given"),
    [
        ("qwen3", "qwen3", {}),
        ("glm-4.5", "glm4moe", {}),
        ("llama-3", "llama3_1", {"bos_token": "<|begin_of_text|>"}),
        pytest.param("gpt-oss", "gptoss", {}, marks=BIG),  # our prompt goes on: the reply begins in a thought
    ],
)
def test_the_first_turn_is_the_official_one(
    family: str, name: str, given: dict[str, str], messages: tuple[Message, ...]
) -> None:
    tools = PLAIN if family == "gpt-oss" else schemas()
    renderer = FamilyRenderer(family, SafeTokenizer(tokenizer_json(family)), tools)
    expected = official(name, messages, tools, **given)
    if family == "gpt-oss":
        expected += "<|channel|>analysis<|message|>"
    assert renderer._tokenizer.decode(renderer.open(messages)) == expected
    assert renderer.open(messages).tolist() == renderer._tokenizer.encode_format(expected).tolist()


def test_deepseeks_first_turn_is_the_official_one_with_the_tools_in_the_system_message() -> None:
    """Its template has no place for tools; the file at hand is of the reasoning model, which begins with a thought."""
    tokenizer = SafeTokenizer(tokenizer_json("deepseek-v3"))
    expected = official("deepseekv3", TASK, [], bos_token="<\uff5cbegin\u2581of\u2581sentence\uff5c>")
    bare = FamilyRenderer("deepseek-v3", tokenizer, [])
    assert tokenizer.decode(bare.open(TASK)) == expected.removesuffix("<think>\n")
    text = tokenizer.decode(renderer_of("deepseek-v3").open(TASK))
    assert '"name": "edit_file"' in text.partition("<\uff5cUser\uff5c>")[0]


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3_5_nothink", "qwen3_instruct_2507"])
def test_an_official_template_is_a_renderer_of_its_own(name: str) -> None:
    """Qwen3.5's calls are Qwen3-Coder's."""
    tokenizer = SafeTokenizer(tokenizer_json("qwen3"))
    renderer = TemplateRenderer(tokenizer, template(name), schemas(), specials={}, stop_tokens=["<|im_end|>"])
    opening = tokenizer.decode(renderer.open(TASK))
    assert opening == official(name, TASK, schemas())
    call = ToolCall(name="read_file", arguments={"path": "a.py"})
    reply = renderer._spelled(call) + "<|im_end|>"
    assert renderer.parse(tokenizer.encode_format(reply)).calls == (call,)
    window = tokenizer.encode_format(opening + reply)
    after = renderer.follow(window, len(window) - 1, Message(role="assistant", calls=(call,)), [answers("1\tx")])
    assert after is not None
    assert "<tool_response>\n1\tx\n</tool_response>" in tokenizer.decode(after)
    assert ("<function=read_file>" in reply) == (name == "qwen3_5_nothink")
