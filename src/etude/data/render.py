"""Conversations <-> ids. A renderer is a chat format: how messages are spelled, and how calls are read back.

    messages --open--> ids up to <|assistant|> --engine samples--> reply ids --parse--> text and calls
                                                      results --follow--> ids that follow the reply

The nano's window, with the values of all arguments in the order of NANO_TOOLS; an optional one that is absent is empty:

    <|begin|> [<|system|> text] <|user|> text <|assistant|> reply [<|result|> text]*n <|assistant|> reply ...
    reply = [text] [<|call|> name [<|arg|> value]*]* <|end|>

Ids in, ids out: `follow` only ever appends, and nothing that was sampled is spelled again. A broken call is read as a
ToolCall with `error` set; `parse` never raises, whatever was sampled.

What it does not do: decide what a call means (agent), or run one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from etude.data.tokenizer import Tokenizer
from etude.protocols import Message
from etude.types import Noun, ToolCall, ToolResult


class Parameter(Noun, frozen=True):
    """One argument of a tool. `kind` is `string` or `integer`."""

    name: str
    kind: str = "string"
    required: bool = True


NANO_TOOLS: Mapping[str, tuple[Parameter, ...]] = {
    "read_file": (Parameter(name="path"),),
    "edit_file": (
        Parameter(name="path"),
        Parameter(name="line", kind="integer", required=False),
        Parameter(name="old"),
        Parameter(name="new"),
    ),
    "run_tests": (),
    "finish": (Parameter(name="message"),),
}
"""Frozen: later versions only add. The order of the arguments is the order in which the nano writes them: the line
comes before the text, since where to edit is the decision, and what stands there can then be copied."""


class Parsed(Noun, frozen=True):
    """A reply that was read. The three counts are sampled tokens by kind and add up to the reply's length.

    Text beside calls counts as thinking; text without calls, and the message of finish, is the final message.
    """

    text: str
    calls: tuple[ToolCall, ...]
    thinking_tokens: int
    call_tokens: int
    message_tokens: int


def with_system(messages: Sequence[Message], words: str) -> list[Message]:
    """The conversation with `words` at the end of its system message, which is made if there is none."""
    if not words:
        return list(messages)
    if messages and messages[0].role == "system":
        return [Message(role="system", text=f"{messages[0].text}\n\n{words}"), *messages[1:]]
    return [Message(role="system", text=words), *messages]


class Renderer(Protocol):
    """A chat format."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Sampling one of these ends a reply; it is part of the reply."""
        ...

    def open(self, messages: Sequence[Message]) -> np.ndarray:
        """[n] int32: the whole conversation, up to the mark after which the policy writes."""
        ...

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray | None:
        """[n] int32: what follows the window whose last reply begins at `start`, up to the next mark after which the
        policy writes. new: what came after the reply: results of its calls, what the user says, or both.

        reply: as it was parsed. If the reply was cut before it ended, it stays as it was sampled. None: this format has
        to write the conversation anew, in a new context.
        """
        ...

    def parse(self, ids: Sequence[int] | np.ndarray) -> Parsed:
        """Read a sampled reply. Never raises."""
        ...

    def spell(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids as they are, control tokens spelled out."""
        ...


class NanoRenderer:
    """The nano's chat format."""

    def __init__(self, tokenizer: Tokenizer, tools: Mapping[str, Sequence[Parameter]] | None = None) -> None:
        self.tokenizer = tokenizer
        self._tools = dict(tools if tools is not None else NANO_TOOLS)
        control = tokenizer.control
        self.pad, self.begin = control("<|pad|>"), control("<|begin|>")
        self._system, self._user, self._assistant = control("<|system|>"), control("<|user|>"), control("<|assistant|>")
        self._call, self._arg, self._result = control("<|call|>"), control("<|arg|>"), control("<|result|>")
        self.end = control("<|end|>")
        self.stop_ids: tuple[int, ...] = (self.end,)
        self._controls = frozenset((self.pad, self.begin, self._system, self._user, self._assistant, self._call,
                                    self._arg, self._result, self.end))  # fmt: skip

    def open(self, messages: Sequence[Message]) -> np.ndarray:
        return np.concatenate([self._one(self.begin), *self._messages(messages), self._one(self._assistant)])

    def _messages(self, messages: Sequence[Message]) -> list[np.ndarray]:
        parts: list[np.ndarray] = []
        for message in messages:
            if message.role == "system":
                if message.text:
                    parts += [self._one(self._system), self.tokenizer.encode(message.text)]
            elif message.role == "assistant":
                parts += [self._one(self._assistant), self.reply(message.text, message.calls)]
            elif message.role == "tool":
                parts += [self._results(message.results)]
            else:
                parts += [self._one(self._user), self.tokenizer.encode(message.text)]
        return parts

    def reply(self, text: str, calls: Sequence[ToolCall]) -> np.ndarray:
        """A reply as the policy would sample it, `<|end|>` included. For transcripts.

        Errors: KeyError for a tool or an argument that the schema does not have.
        """
        parts = [self.tokenizer.encode(text)]
        for call in calls:
            parts += [self._one(self._call), self.tokenizer.encode(call.name)]
            names = [parameter.name for parameter in self._tools[call.name]]
            unknown = set(call.arguments) - set(names)
            if unknown:
                raise KeyError(f"{call.name} has no argument {sorted(unknown)[0]}")
            for parameter in self._tools[call.name]:
                value = call.arguments.get(parameter.name)
                if value is None and parameter.required:
                    raise KeyError(f"{call.name}: {parameter.name} is missing")
                parts += [self._one(self._arg), self.tokenizer.encode("" if value is None else str(value))]
        parts.append(self._one(self.end))
        return np.concatenate(parts)

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray:
        return np.concatenate([*self._messages(new), self._one(self._assistant)])

    def spell(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(ids)

    def results(self, results: Sequence[ToolResult]) -> np.ndarray:
        """[n] int32: what follows a reply that these results answer, whatever it was."""
        return np.concatenate([self._results(results), self._one(self._assistant)])

    def parse(self, ids: Sequence[int] | np.ndarray) -> Parsed:
        tokens = [int(number) for number in ids]
        ended = bool(tokens) and tokens[-1] == self.end
        body = tokens[:-1] if ended else tokens
        pieces = _split(body, self._call)
        calls = []
        message_tokens = 0
        for number, piece in enumerate(pieces[1:], 2):
            whole = ended or number < len(pieces)
            call = self._read_call(piece, whole)
            if call.name == "finish" and call.error is None:
                message_tokens += sum(map(len, _split(piece, self._arg)[1:]))
            calls.append(call)
        text_tokens = len(pieces[0])
        call_tokens = len(tokens) - text_tokens - message_tokens if calls else 0
        if not calls:
            message_tokens, text_tokens = len(tokens), 0
        return Parsed(text=self._text(pieces[0]), calls=tuple(calls), thinking_tokens=text_tokens,
                      call_tokens=call_tokens, message_tokens=message_tokens)  # fmt: skip

    def _read_call(self, piece: Sequence[int], whole: bool) -> ToolCall:
        """One call from the ids between its mark and the next. `whole`: it was not cut by the end of the reply."""
        fields = _split(piece, self._arg)
        name = self._text(fields[0])
        if not whole:
            return ToolCall(name=name, arguments={}, error="the call was cut off before its end")
        if any(number in self._controls for field in fields for number in field):
            return ToolCall(name=name, arguments={}, error="a control token stands inside the call")
        if name not in self._tools:
            return ToolCall(name=name, arguments={}, error=f"no tool of this name; there are {', '.join(self._tools)}")
        parameters, values = self._tools[name], [self._text(field) for field in fields[1:]]
        if len(values) != len(parameters):
            wanted = f"{len(parameters)} argument{'s' * (len(parameters) != 1)}"
            return ToolCall(name=name, arguments={}, error=f"{name} takes {wanted}, got {len(values)}")
        arguments: dict[str, object] = {}
        for parameter, value in zip(parameters, values, strict=True):
            if not value and not parameter.required:
                continue
            if parameter.kind == "integer":
                # Stricter than int(): no spaces, underscores, or digits of other scripts.
                if not (value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 9):
                    return ToolCall(
                        name=name, arguments={}, error=f"{parameter.name} must be an integer, got {value!r}"
                    )
                arguments[parameter.name] = int(value)
            else:
                arguments[parameter.name] = value
        return ToolCall(name=name, arguments=arguments)

    def _results(self, results: Sequence[ToolResult]) -> np.ndarray:
        parts: list[np.ndarray] = [np.zeros(0, np.int32)]
        for result in results:
            parts += [self._one(self._result), self.tokenizer.encode(result.text)]
        return np.concatenate(parts)

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([number for number in ids if number not in self._controls])

    @staticmethod
    def _one(number: int) -> np.ndarray:
        return np.array([number], np.int32)


def _split(tokens: Sequence[int], mark: int) -> list[list[int]]:
    """Like str.split for ids: always at least one piece."""
    pieces: list[list[int]] = [[]]
    for token in tokens:
        if token == mark:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces
