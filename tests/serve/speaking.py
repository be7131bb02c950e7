"""What the tests of serving share: a scripted engine that speaks Qwen3, a recorder in memory, a server around both.

    async with serving(says("hello"), calls("shell", command="ls")) as site:
        site.url, site.engine.requests, site.recorder.turns

The script is a list of replies, or a function of the request; ids are those of Qwen3's own vocabulary and format.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent.scripted_engine import ScriptedEngine
from data.vocabularies import tokenizer_json
from etude.agent.recipe import AgentRecipe
from etude.data.families import FamilyRenderer
from etude.data.render import Renderer
from etude.data.tokenizer import SafeTokenizer
from etude.protocols import Event, GenerateRequest, Owner, SandboxPool, ServedTurn
from etude.serve.keys import Caller, Keys, Quota, hash_of
from etude.serve.parts import make_server
from etude.serve.recipe import ServeRecipe
from etude.types import Opened, Routes, ToolCall

END = "<|im_end|>"


@functools.cache
def tokenizer() -> SafeTokenizer:
    return SafeTokenizer(tokenizer_json("qwen3"))


class QwenChat:
    """data.formats.ChatFormat of a Qwen3 without weights."""

    max_context = 262_144

    def renderer(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        return FamilyRenderer("qwen3", tokenizer(), tools)


def spelled(text: str, *wanted: ToolCall) -> list[int]:
    """A reply as the model would sample it, its end included."""
    parts = [text] if text else []
    for call in wanted:
        inner = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{inner}\n</tool_call>")
    return tokenizer().encode_format("\n".join(parts) + END).tolist()


def says(text: str) -> list[int]:
    return spelled(text)


def calls(name: str, text: str = "", **arguments: Any) -> list[int]:
    return spelled(text, ToolCall(name=name, arguments=arguments))


def decoded(ids: Sequence[int] | np.ndarray) -> str:
    return tokenizer().decode([int(token) for token in ids])


@dataclass
class MemoryRecorder:
    """protocols.SessionRecorder, in memory."""

    turns: list[ServedTurn] = field(default_factory=list)
    events: list[tuple[Owner, Event]] = field(default_factory=list)
    before: Callable[[ServedTurn], None] = lambda turn: None

    async def record(self, turn: ServedTurn) -> None:
        self.before(turn)
        self.turns.append(turn)

    async def note(self, owner: Owner, event: Event) -> bool:
        known = {(turn.owner.tenant, turn.session_id) for turn in self.turns}
        if (owner.tenant, event.session_id) not in known:
            return False
        self.events.append((owner, event))
        return True

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class Window:
    """A window as the recorded turns give it."""

    ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    opened: Opened | None


def windows_of(turns: Sequence[ServedTurn]) -> dict[tuple[str, int], Window]:
    """By session and number: turns laid end to end, gaps and overlaps refused."""
    found: dict[tuple[str, int], Window] = {}
    for turn in turns:
        if turn.tokens is None:
            continue
        key, tokens = (turn.session_id, turn.context), turn.tokens
        if turn.opened is not None:
            assert key not in found
            assert tokens.start == 0
            found[key] = Window(tokens.ids, tokens.sampled, tokens.logprobs, turn.opened)
            continue
        window = found[key]
        assert tokens.start == len(window.ids), "turns of a window lie end to end"
        for name in ("ids", "sampled", "logprobs"):
            setattr(window, name, np.concatenate([getattr(window, name), getattr(tokens, name)]))
    return found


def check_exact(turns: Sequence[ServedTurn], engine: ScriptedEngine, replies: Mapping[str, Sequence[int]]) -> None:
    """Each window is what the engine was asked and what it answered, token by token. replies: by request id."""
    asked = {request.request_id: request for request in engine.requests}
    windows: dict[tuple[str, int], list[int]] = {}
    for turn in turns:
        assert turn.tokens is not None
        key = (turn.session_id, turn.context)
        before = windows.get(key, [])
        assert (turn.opened is None) == bool(before)
        assert turn.tokens.start == len(before)
        whole = before + turn.tokens.ids.tolist()
        prompt, reply = asked[turn.turn_id].ids.tolist(), list(replies[turn.turn_id])
        assert whole == prompt + reply
        assert turn.tokens.sampled.tolist() == [place >= len(prompt) for place in range(len(before), len(whole))]
        assert np.all(turn.tokens.logprobs[turn.tokens.sampled] == np.float32(-0.5))
        assert turn.tokens.versions
        windows[key] = whole


class Speaker(ScriptedEngine):
    """Remembers what it answered to each request."""

    def __init__(self, script: Sequence[Sequence[int]] | Callable[[GenerateRequest], Sequence[int]]) -> None:
        self.answers: dict[str, list[int]] = {}
        self._script, self._next = script, 0
        super().__init__(self._reply)

    def _routes(self, rows: int) -> Routes:
        """Expert numbers go round: there may be more requests than numbers."""
        experts = np.full((rows, 2, 1), len(self.requests) % 256, np.uint8)
        return Routes(experts=experts, valid=np.ones(rows, bool))

    def _reply(self, request: GenerateRequest) -> Sequence[int]:
        if callable(self._script):
            reply = list(self._script(request))
        else:
            reply = list(self._script[min(self._next, len(self._script) - 1)])
            self._next += 1
        self.answers[request.request_id] = reply[: request.max_new_tokens]
        return reply


@dataclass
class Site:
    url: str
    engine: Any
    recorder: MemoryRecorder
    server: Any


def keys_of(**owners: tuple[Owner, Quota]) -> Keys:
    """Keys with the given texts."""
    return Keys([(hash_of(key), Caller(name=key, owner=owner, quota=quota)) for key, (owner, quota) in owners.items()])


@contextlib.asynccontextmanager
async def serving(
    script: Any, *, keys: Keys | None = None, recorder: Any = None, name: str = "qwen", chat: Any = None,
    pool: SandboxPool | None = None, agent: AgentRecipe | None = None, **settings: Any,
) -> AsyncIterator[Site]:  # fmt: skip
    """script: replies, a function of the request, or an engine. pool, agent: to serve the agent too."""
    engine = script if hasattr(script, "generate") else Speaker(script)
    recorder = MemoryRecorder() if recorder is None else recorder
    recipe = ServeRecipe(**{"port": 0, "drain_s": 2.0, "consent": "train", **settings})
    server = make_server(
        engine, chat or QwenChat(), recipe, name=name, recorder=recorder, keys=keys, pool=pool, agent=agent
    )
    await server.start()
    try:
        yield Site(server.url, engine, recorder, server)
    finally:
        await server.close()
