"""Windows that were sampled, remembered by what the client knows of them: ids are reused and never spelled again.

    history up to its last reply --digest--> window whose reply that was --> its ids, then what the new messages add

    the window's last reply, and nobody is at it      the window goes on: same context, KV reused
    an earlier reply, or somebody is at it            a fork: a new context that begins with the same ids
    no such digest                                    a new context; client_rewrite if the history has replies

Bounded by windows and by ids, the longest unused go first; what is forgotten, by a restart too, is just written anew.
A digest begins with whose it is (conversation.py): no window of another key can be found. Sessions are numbered here:
turns and contexts of one session, under an id that no other has. What it does not do: hold what is being sampled.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.agent.window import Epochs
from etude.types import digest_of

_ID = re.compile(r"s-([0-9a-f]{20})-[0-9a-f]{12}")


@dataclass(slots=True, eq=False)
class Session:
    """What is said under one name, while it is remembered."""

    session_id: str
    stem: str
    turns: int = 0
    contexts: int = 0

    def next_turn(self) -> int:
        self.turns += 1
        return self.turns - 1

    def give_back(self, number: int) -> None:
        """The turn of that number was not kept: the next one has it, so that no number is missing."""
        if number == self.turns - 1:
            self.turns -= 1

    def next_context(self) -> int:
        self.contexts += 1
        return self.contexts - 1


@dataclass(slots=True)
class Boundary:
    """Where a reply lies in its window, and the digest of the conversation up to it."""

    start: int
    end: int
    key: bytes


@dataclass(slots=True, eq=False)
class ServedWindow:
    """One token window of a session."""

    session: Session
    context: int
    """Its number in the session."""
    context_id: str
    """The engine's name for its KV."""
    ids: np.ndarray
    """[n] int32."""
    epochs: Epochs = field(default_factory=Epochs)
    replies: list[Boundary] = field(default_factory=list)
    is_busy: bool = False

    def __len__(self) -> int:
        return len(self.ids)


class Sessions:
    """By name and owner, the longest unused forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_stem: OrderedDict[str, Session] = OrderedDict()

    def named(self, scope: bytes, name: str) -> Session:
        """The session of that name, or of that id, of this owner; a new one if it is not remembered."""
        if match := _ID.fullmatch(name):
            found = self._by_stem.get(match[1])
            if found is not None and found.session_id == name and match[1] == _stem(scope, match[1], is_check=True):
                return self._used(found)
        stem = _stem(scope, name)
        found = self._by_stem.get(stem)
        return self._used(found or Session(session_id=f"s-{stem}-{secrets.token_hex(6)}", stem=stem))

    def new(self, scope: bytes) -> Session:
        """One without a name; it can be named by its id from now on."""
        return self.named(scope, secrets.token_hex(16))

    def _used(self, session: Session) -> Session:
        self._by_stem[session.stem] = session
        self._by_stem.move_to_end(session.stem)
        if len(self._by_stem) > self._limit:
            self._by_stem.popitem(last=False)
        return session


def _stem(scope: bytes, name: str, *, is_check: bool = False) -> str:
    """20 hex digits: 10 of the name, 10 that prove the owner. is_check: `name` is a stem whose proof is made anew."""
    head = name[:10] if is_check else digest_of(scope.hex(), name)[:10]
    return head + digest_of(scope.hex(), "owner", head)[:10]


class Memory:
    """Remembered windows."""

    def __init__(self, *, max_windows: int, max_tokens: int) -> None:
        self._max_windows, self._max_tokens = max_windows, max_tokens
        self._windows: OrderedDict[str, ServedWindow] = OrderedDict()
        self._by_key: dict[bytes, list[ServedWindow]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._windows)

    def find(self, key: bytes, session: Session | None) -> tuple[ServedWindow, Boundary] | None:
        """The window with the reply that `key` names, one that can go on before others. session: only of this one."""
        best: tuple[ServedWindow, Boundary] | None = None
        for window in self._by_key.get(key, ()):
            if session is not None and window.session is not session:
                continue
            boundary = next(reply for reply in reversed(window.replies) if reply.key == key)
            if boundary is window.replies[-1] and not window.is_busy:
                return window, boundary
            best = window, boundary
        return best

    def keep(self, window: ServedWindow, ids: np.ndarray, reply: Boundary) -> list[str]:
        """The window with a new reply; the contexts that were forgotten for it."""
        self.tokens += len(ids) - (len(window.ids) if window.context_id in self._windows else 0)
        window.ids = ids
        window.replies.append(reply)
        self._by_key.setdefault(reply.key, []).append(window)
        self._windows[window.context_id] = window
        self._windows.move_to_end(window.context_id)
        return self._shrink()

    def _shrink(self) -> list[str]:
        forgotten: list[str] = []
        if len(self._windows) <= self._max_windows and self.tokens <= self._max_tokens:
            return forgotten
        idle = [name for name, window in self._windows.items() if not window.is_busy]
        for name in idle:
            if len(self._windows) <= self._max_windows and self.tokens <= self._max_tokens:
                break
            window = self._windows.pop(name)
            self.tokens -= len(window.ids)
            for reply in window.replies:
                others = [other for other in self._by_key[reply.key] if other is not window]
                if others:
                    self._by_key[reply.key] = others
                else:
                    del self._by_key[reply.key]
            forgotten.append(name)
        return forgotten


def follows(ids: np.ndarray, new: Sequence[int] | np.ndarray) -> np.ndarray:
    """[n] int32: `ids`, then `new`."""
    return np.concatenate([ids, np.asarray(new, np.int32)])
