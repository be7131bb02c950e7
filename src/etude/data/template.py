"""A model's own chat template as a renderer, for families without one of their own: ids in, ids out, and safe.

The template is a Jinja program from the checkpoint, run in a sandbox. It is given marks instead of texts; what it
writes between the marks is the format, in which control tokens are control tokens, and each mark is then replaced by
the ids of its text, in which they never are: a file that spells `<|im_end|>` ends no turn. What follows a reply is
found by rendering a reply and what came after it, and taking what stands after the reply's mark.

    messages --marks--> template --> "<|im_start|>user\n" [3] "<|im_end|>\n..." --> ids

Tools: where the template knows `tools` it writes them itself; else they stand in the system message, in the words that
most open models were tuned on. Thinking of earlier turns stays as it was sampled. A template may trim texts. What it
does not do: templates that count, cut or compare them (they would see marks); such a model is refused when opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.data.calls import CLOSE, OPEN, Read, read_hermes, read_xml
from etude.data.render import Parsed, with_system
from etude.data.tokenizer import SafeTokenizer
from etude.errors import ModelError
from etude.protocols import Message
from etude.types import ToolCall, ToolResult

_TOOLS = """You can use tools. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""
_MARK = "\ue000{}\ue001"
"""Characters that no text of the format holds."""
_PAD = "\n \n"


class TemplateRenderer:
    """data.render.Renderer over a Jinja chat template."""

    def __init__(
        self, tokenizer: SafeTokenizer, template: str, tools: Sequence[Mapping[str, Any]], *,
        specials: Mapping[str, str], stop_tokens: Sequence[str],
    ) -> None:  # fmt: skip
        """specials: bos_token, eos_token and the like, as the template names them. Errors: ModelError."""
        self._tokenizer, self._specials = tokenizer, dict(specials)
        self._tools = [{"type": "function", "function": dict(tool)} for tool in tools]
        self._knows_tools = "tools" in template
        self._read: Read = read_xml if "<function=" in template else read_hermes
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise ModelError(
                "the chat template cannot be read", cause=str(error), hint="see tokenizer_config.json"
            ) from error
        self.stop_ids = tuple(tokenizer.control(token) for token in stop_tokens)
        self._trims: frozenset[str] = frozenset()
        """Roles whose texts the template trims."""
        self._trims = self._check()

    def open(self, messages: Sequence[Message]) -> np.ndarray:
        pieces, texts = self._render(messages, prompt=True)
        return self._ids(pieces, texts)

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray | None:
        ask = Message(role="user", text="?")
        whole = [ask, Message(role="assistant", text="?"), *new]
        pieces, texts = self._render(whole, prompt=True)
        place = next(number for number, (_, mark) in enumerate(pieces) if mark is not None and texts[mark][1])
        after = [(piece, mark) for piece, mark in pieces[place + 1 :]]
        ids = self._ids(after, texts)
        if len(window) > start and len(ids) and window[-1] == ids[0] and int(ids[0]) in self.stop_ids:
            ids = ids[1:]
        return ids

    def parse(self, ids: Sequence[int] | np.ndarray) -> Parsed:
        tokens = [int(number) for number in ids]
        body = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        text = self._tokenizer.decode(body)
        said, calls = self._read(text)
        before = len(self._tokenizer.encode(text.partition(OPEN)[0])) if calls else len(tokens)
        before = min(before, len(tokens))
        return Parsed(
            text=said, calls=tuple(calls), thinking_tokens=before if calls else 0, call_tokens=len(tokens) - before,
            message_tokens=0 if calls else before,
        )  # fmt: skip

    def spell(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(number) for number in ids])

    def _render(
        self, messages: Sequence[Message], *, prompt: bool, pad: str = ""
    ) -> tuple[list[tuple[str, int | None]], list[tuple[str, bool]]]:
        """Pieces (format text, number of the text that follows it or None), and the texts (is it a reply's?).

        pad: stands around every mark.

        Errors: ModelError for a template that fails.
        """
        texts: list[tuple[str, bool]] = []

        def mark(text: str, role: str) -> str:
            texts.append((text.strip() if role in self._trims else text, role == "assistant"))
            return pad + _MARK.format(len(texts) - 1) + pad

        chat: list[dict[str, Any]] = []
        for message in self._with_tools(messages):
            if message.role == "tool":
                chat += [{"role": "tool", "content": mark(result.text, "tool")} for result in message.results]
            elif message.role == "assistant":
                spelled = "\n".join([message.text, *map(self._spelled, message.calls)]).strip("\n")
                chat.append({"role": "assistant", "content": mark(spelled, "assistant")})
            else:
                chat.append({"role": message.role, "content": mark(message.text, message.role)})
        given = {"messages": chat, "add_generation_prompt": prompt, **self._specials}
        if self._knows_tools and self._tools:
            given["tools"] = self._tools
        try:
            rendered = self._template.render(**given)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ModelError("the chat template failed", cause=str(error), hint="see tokenizer_config.json") from error
        return _split(rendered), texts

    def _with_tools(self, messages: Sequence[Message]) -> list[Message]:
        if self._knows_tools or not self._tools:
            return list(messages)
        return with_system(messages, _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in self._tools)))

    def _spelled(self, call: ToolCall) -> str:
        """A call of an earlier turn, where it has to be written again."""
        if self._read is read_hermes:
            inner = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
        else:
            values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in call.arguments.items())
            inner = f"<function={call.name}>\n{values}</function>"
        return f"{OPEN}\n{inner}\n{CLOSE}"

    def _ids(self, pieces: Sequence[tuple[str, int | None]], texts: Sequence[tuple[str, bool]]) -> np.ndarray:
        parts = [np.zeros(0, np.int32)]
        for piece, number in pieces:
            parts.append(self._tokenizer.encode_format(piece))
            if number is not None:
                parts.append(np.array(self._tokenizer.encode(texts[number][0]), np.int32))
        return np.concatenate(parts)

    def _check(self) -> frozenset[str]:
        """Every text must come out of the template once, in order; the roles whose texts come out trimmed.

        Errors: ModelError.
        """
        messages = [
            Message(role="system", text="s"), Message(role="user", text="u"), Message(role="assistant", text="a"),
            Message(role="tool", results=(ToolResult(text="t"), ToolResult(text="v"))),
        ]  # fmt: skip
        for given in (messages[:2], messages, messages[1:]):
            pieces, texts = self._render(given, prompt=True)
            seen = [number for _, number in pieces if number is not None]
            if seen != list(range(len(texts))):
                raise ModelError(
                    "the chat template changes the texts that it is given",
                    cause=f"of {len(texts)} texts it wrote {len(seen)}, or in another order",
                    hint="docs/support.md lists the formats that are known by name",
                )
        pieces, _ = self._render(messages, prompt=True, pad=_PAD)
        roles = [message.role for message in messages for _ in message.results or (message,)]
        return frozenset(role for role, (before, _) in zip(roles, pieces, strict=False) if not before.endswith(_PAD))


def _split(rendered: str) -> list[tuple[str, int | None]]:
    pieces: list[tuple[str, int | None]] = []
    rest = rendered
    while "\ue000" in rest:
        before, _, rest = rest.partition("\ue000")
        number, _, rest = rest.partition("\ue001")
        pieces.append((before, int(number)))
    return [*pieces, (rest, None)]


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """As transformers' own filter: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
