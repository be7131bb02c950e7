"""Turns and events for tests."""

from __future__ import annotations

import itertools

import numpy as np

from etude.protocols import Consent, Event, Message, Owner, Reply, RepositoryState, ServedTokens, ServedTurn
from etude.types import Effort, KVEpoch, Opened, Run, StopReason, ToolCall, Version

_count = itertools.count()


def owner(**changes: object) -> Owner:
    values = {"tenant": "acme", "user": "ann", "consent": Consent.TRAIN, "retention_days": None}
    return Owner(**{**values, **changes})


def version(n: int) -> Version:
    return Version(incarnation=1, n=n, step=n)


def reply(text: str = "done", *calls: ToolCall) -> Reply:
    return Reply(text=text, calls=calls, stop=StopReason.END, effort=Effort(turns=1, calls=len(calls)), span=None)


def tokens(start: int = 0, prompt: int = 3, sampled: int = 2, by: int = 4) -> ServedTokens:
    count = prompt + sampled
    mask = np.array([False] * prompt + [True] * sampled)
    return ServedTokens(
        start=start, ids=np.arange(start, start + count, dtype=np.int32), sampled=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)).astype(np.float32),
        versions=(Run(start=start + prompt, version=version(by)),),
        kv_epochs=(KVEpoch(first=start + prompt, runs=(Run(start=0, version=version(by)),)),),
    )  # fmt: skip


def turn(text: str = "please repair f", **changes: object) -> ServedTurn:
    number = next(_count)
    values = {
        "turn_id": f"turn-{number}", "session_id": "session-1", "number": 0, "owner": owner(), "source": "openai",
        "model": "nano", "started_at": 1_700_000_000.0 + number, "first_token_s": 0.1, "wall_s": 1.5,
        "messages": (Message(role="user", text=text),), "reply": reply(), "opened": Opened.TASK,
        "repository": RepositoryState(root="shop", commit="a" * 40, branch="main"),
    }  # fmt: skip
    return ServedTurn(**{**values, **changes})


def event(**changes: object) -> Event:
    values = {"event_id": f"event-{next(_count)}", "session_id": "session-1", "turn_id": None, "kind": "rating",
              "at": 1_700_000_100.0, "value": 1.0}  # fmt: skip
    return Event(**{**values, **changes})
