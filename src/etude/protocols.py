"""What the rooms promise each other. A room imports these, never its neighbour.

Implementations: `inference.torch_engine` (Engine), `agent.policy` (Policy), `sandbox.namespace` (Sandbox),
`metrics` (Recorder), and the scripted ones under `tests/` that stand at the outer edge.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from etude.types import (
    Context,
    Effort,
    KVEpoch,
    Manifest,
    Noun,
    Opened,
    Routes,
    Run,
    Span,
    StopReason,
    ToolCall,
    ToolResult,
    Version,
)

# Engine: ids in; ids, log-probs, versions, routes out


class GenerateRequest(Noun, frozen=True, kw_only=True):
    """Ask for tokens after `ids`.

    `context_id` is constant over the turns of one context: its KV is reused, also over a swap of weights. Requests of
    siblings share KV of equal prefixes only where the current version computed it.
    """

    request_id: str
    context_id: str
    ids: np.ndarray
    """[n] int32, n >= 1: the whole window so far."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """Sampling one of these ends the reply; it is part of the reply."""
    banned_ids: tuple[int, ...] = ()
    """Never sampled. Log-probs are of the distribution sampled from. For evaluation controls, not for training."""
    temperature: float = 1.0
    seed: int | None = None
    min_step: int | None = None
    """Refused with VersionError unless the serving version has at least this step."""
    exact: Version | None = None
    """Refused with VersionError unless exactly this version serves, from the first token to the last."""
    keep_context: bool = True
    """Whether a next turn is expected: False frees the context's KV at once."""


class TokenChunk(Noun, frozen=True, kw_only=True):
    """New tokens of one request, in order. The last chunk has `stop` set and carries the records of the whole window.

    `kv_epochs` and `routes` speak of positions in the window (prompt and reply), as `Context` does; `routes` covers the
    rows that this request computed, from row `routes_start` on.
    """

    request_id: str
    ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[Run, ...]
    """Positions count from the start of the window."""
    stop: StopReason | None = None
    kv_epochs: tuple[KVEpoch, ...] = ()
    routes: Routes | None = None
    routes_start: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose KV was taken over, not computed again."""


class EngineStats(Noun, frozen=True, kw_only=True):
    """Counters since start, and gauges."""

    version: Version | None
    running: int
    waiting: int
    prefilled_tokens: int
    reused_tokens: int
    stale_reused_tokens: int
    """Tokens served from KV of an older version."""
    sampled_tokens: int
    swaps: int
    swap_pause_s: float
    """Sum over swaps of the time between two decoding steps that the swap took."""
    busy_s: float


@runtime_checkable
class Engine(Protocol):
    """A model that answers many requests at once. Errors: EngineError and its kinds."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the reply. Closing the iterator cancels the request."""
        ...

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        """[n] float32 log-probs of ids under the serving version at T = 1 (entry 0 is 0), and the routes taken.

        Routes that are passed in are forced.
        """
        ...

    async def forget(self, context_id: str) -> None:
        """Free a context's KV; unknown ids are ignored."""
        ...

    async def load(self, manifest: Manifest) -> None:
        """Stage the version, then swap to it between two decoding steps; requests in flight go on with their KV."""
        ...

    async def stats(self) -> EngineStats: ...


# Policy: all that the agent knows of a model


class Message(Noun, frozen=True, kw_only=True):
    """One entry of a conversation: system or user text, the policy's own reply, or the results of its calls."""

    role: str
    """system, user, assistant, tool."""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()


class Reply(Noun, frozen=True, kw_only=True):
    """What the policy said, parsed. Calls that could not be read are in `calls` with their `error` set."""

    text: str
    calls: tuple[ToolCall, ...]
    stop: StopReason
    effort: Effort
    """Tokens of this reply by kind; `output_tokens` counts the tool output that was read before it."""
    span: Span | None


@runtime_checkable
class Policy(Protocol):
    """Answers one episode's conversation. A policy object serves one episode and is closed after it."""

    async def reply(self, conversation: Sequence[Message]) -> Reply:
        """The next turn. The conversation only ever grows between calls."""
        ...

    def contexts(self) -> tuple[Context, ...]:
        """The token windows so far; empty for a foreign endpoint."""
        ...

    async def close(self) -> None: ...


# Sandbox


class ExecResult(Noun, frozen=True, kw_only=True):
    """What a command did. A non-zero exit code is data; a broken sandbox is a SandboxError."""

    exit_code: int
    """Negative: killed by that signal."""
    stdout: bytes
    stderr: bytes
    result: bytes
    """What the command wrote to file descriptor 3: a channel apart from its output."""
    timed_out: bool
    truncated: bool
    """Output beyond the limit was dropped."""
    wall_s: float


class Snapshot(Noun, frozen=True, kw_only=True):
    """A saved workspace. `memory` says whether processes are part of it."""

    snapshot_id: str
    path: str
    memory: bool


@runtime_checkable
class Sandbox(Protocol):
    """A machine of its own for what nobody trusts. The workspace is the folder /workspace inside.

    Errors: SandboxError if the sandbox itself is broken or gone. What a command does wrong is in its ExecResult.
    """

    sandbox_id: str

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, env: Mapping[str, str] | None = None,
        leaves: bool = False,
    ) -> ExecResult:  # fmt: skip
        """Run a program in /workspace; its whole process tree is killed at the end.

        leaves: what it started in the background lives on, through later runs, until the sandbox is closed.
        """
        ...

    async def run_python(self, source: str, *, stdin: bytes = b"", timeout_s: float) -> ExecResult:
        """Run Python source in a fork of a warm interpreter: same isolation as exec, a fresh process, less time."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Errors: FileNotFoundError, IsADirectoryError, PermissionError (a path or link that leads outside)."""
        ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def list_files(self) -> tuple[str, ...]:
        """Regular files of the workspace, relative paths, sorted; links are not followed."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def fork(self) -> Sandbox:
        """Another sandbox with a copy of this workspace."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SandboxPool(Protocol):
    """Hands out fresh sandboxes, each used by one episode or one grading."""

    async def acquire(self, files: Mapping[str, str]) -> Sandbox:
        """A sandbox whose workspace holds `files` and nothing else. The caller closes it."""
        ...

    async def close(self) -> None: ...


# Recording what is served, and what people did next


class Consent(enum.StrEnum):
    """What a person allowed. Without consent nothing is stored."""

    NONE = "none"
    KEEP = "keep"
    """Kept for that person and their team to look at; never trained on."""
    TRAIN = "train"


class Owner(Noun, frozen=True, kw_only=True):
    """Whose a session is, and what may be done with it.

    >>> Owner(tenant="acme", user="u-17", consent=Consent.TRAIN, retention_days=90)
    """

    tenant: str
    user: str
    consent: Consent
    retention_days: int | None = None
    """After so many days it is deleted; None: kept until somebody forgets it."""


class RepositoryState(Noun, frozen=True, kw_only=True):
    """Where a session's code stood when it began."""

    root: str
    """Name of the repository, no path of a person's machine."""
    commit: str
    """Full hash; empty: no commit, or not known."""
    branch: str = ""
    patch: str = ""
    """Unified diff of what was not committed."""


class ServedTokens(Noun, frozen=True, kw_only=True):
    """The exact tokens of one served turn: the part of its window from position `start` on.

    Windows are rebuilt by laying the turns of a context end to end; `sessions.windows` does so.
    """

    start: int
    ids: np.ndarray
    """[n] int32: what this turn added, prompt and reply."""
    sampled: np.ndarray
    """[n] bool."""
    logprobs: np.ndarray
    """[n] float32; 0 where not sampled."""
    versions: tuple[Run, ...]
    """Of the sampled tokens; positions count from the start of the window, as in the following two."""
    kv_epochs: tuple[KVEpoch, ...]
    """Of the whole window so far."""
    routes: Routes | None = None
    routes_start: int = 0


class ServedTurn(Noun, frozen=True, kw_only=True):
    """One answered request: what was new in it, what was answered, and the tokens of both."""

    turn_id: str
    """Unique. Storing a turn twice is storing it once."""
    session_id: str
    number: int
    """Counts the turns of the session."""
    owner: Owner
    source: str
    """Who spoke: openai, anthropic, agent (our endpoints), or the program whose log was read."""
    model: str
    started_at: float
    """Seconds since 1970, UTC."""
    first_token_s: float | None
    wall_s: float
    messages: tuple[Message, ...]
    """What the request added to the conversation; all of it where a context opens."""
    reply: Reply
    context: int = 0
    """Number of the token window within the session."""
    opened: Opened | None = None
    """Why that window begins with this turn; None: it goes on."""
    tokens: ServedTokens | None = None
    """None for turns that a foreign model answered."""
    repository: RepositoryState | None = None


class Event(Noun, frozen=True, kw_only=True):
    """What happened to a turn's work later.

    `kind`: kept, edited, reverted, follow_up, rating, latency, retention. `value`: a share for kept, edited, reverted
    and retention, -1 to 1 for a rating, seconds for latency; None where there is no number.
    """

    event_id: str
    """Unique, as `turn_id`."""
    session_id: str
    turn_id: str | None
    kind: str
    at: float
    """Seconds since 1970, UTC."""
    value: float | None = None
    text: str = ""
    after_s: float | None = None
    """For retention: how long after the commit it was measured."""


@runtime_checkable
class SessionRecorder(Protocol):
    """Keeps what is served. When a method has returned, a crash of this process or of the database loses nothing.

    Errors: StoreError where nothing can be kept at all.
    """

    async def record(self, turn: ServedTurn) -> None: ...

    async def note(self, owner: Owner, event: Event) -> bool:
        """False: no such session of this tenant."""
        ...

    async def close(self) -> None: ...


# Metrics


class Recorder(Protocol):
    """Where rows of numbers go. `kind` names the row (step, eval, engine, ...)."""

    def record(self, kind: str, row: Mapping[str, float | int | str | None]) -> None: ...
