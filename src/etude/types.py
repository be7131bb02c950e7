"""The nouns of Etude: what passes between rooms, each with an example.

Every noun is frozen, slotted and keyword-only; arrays are numpy, never torch. A stage returns a new object and
nothing is filled in later. Structs encode themselves with `etude.frames` (msgpack, arrays as bytes + dtype + shape),
on sockets and on disk alike.

What is not here: a room's private nouns, and anything that does work.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

FORMAT = 1
"""Version of everything that Etude writes; a reader takes its own and refuses others by name."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all nouns."""


def digest_of(*parts: str) -> str:
    """A stable 128-bit hex digest of strings; lengths are hashed too, so that ("ab", "c") differs from ("a", "bc")."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


# Versions


class Version(Noun, frozen=True, kw_only=True, order=True):
    """One published state of the policy: (incarnation, n) names it, `step` places it in its lineage.

    >>> Version(incarnation=1, n=4, step=4)

    Staleness and admission count in `step`, never in `n`: an aborted publish burns an n.
    """

    incarnation: int
    n: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.incarnation}.{self.n}"


class Run(Noun, frozen=True, kw_only=True):
    """From token `start` on, until the next run, `version` holds. A tuple of runs is a run-length coded array."""

    start: int
    version: Version


# Tasks


class IOCheck(Noun, frozen=True, kw_only=True):
    """One call and the value that the original code gave for it.

    >>> IOCheck(call="clamp(7, 0, 5)", expected="5", visible=True)

    `call` is a Python expression over literals, evaluated in the namespace of the module under test. `expected` is the
    canonical text of its value (`rewards.iochecks`), or `raises ValueError`. `visible` checks are those that the
    run_tests tool shows; the others only grade.
    """

    call: str
    expected: str
    visible: bool


class IOChecks(Noun, frozen=True, kw_only=True, tag="iochecks"):
    """Grade by calling: the sandbox returns canonical values, the host compares. Nothing inside can forge that."""

    path: str
    """File under test, relative to the workspace."""
    checks: tuple[IOCheck, ...]


Verifier = IOChecks
"""Union of the verifier specifications; a new kind is a new tagged struct."""


class Limits(Noun, frozen=True, kw_only=True):
    """What an episode of this task may use; recipes may lower these, never raise them."""

    max_turns: int = 12
    wall_s: float = 120.0


class Task(Noun, frozen=True, kw_only=True):
    """A piece of work with a way to tell whether it was done.

    >>> Task.make(prompt="clamp() gives wrong values. Repair it.", workspace={"solution.py": "def clamp ..."},
    ...           verifier=IOChecks(path="solution.py", checks=(...)), category="repair", source={"package": "toolz"})
    """

    task_id: str
    prompt: str
    workspace: Mapping[str, str]
    """Path -> text: the snapshot that the episode starts from."""
    verifier: Verifier
    limits: Limits
    category: str
    source: Mapping[str, str]
    """Where it comes from: builder, package, version, function, fault kind, licence."""
    tools: tuple[str, ...] = ()
    """The tools of this task; none: those of the recipe."""
    strict: tuple[str, ...] | None = None
    """Those of them that take their arguments to the letter; None: those of the recipe."""
    format: int = FORMAT

    @classmethod
    def make(
        cls,
        *,
        prompt: str,
        workspace: Mapping[str, str],
        verifier: Verifier,
        category: str,
        source: Mapping[str, str],
        limits: Limits | None = None,
    ) -> Task:
        """A task whose id is the hash of prompt, workspace and verifier: equal tasks collide."""
        files = digest_of(*(text for item in sorted(workspace.items()) for text in item))
        check = hashlib.blake2b(msgspec.json.encode(verifier, order="deterministic"), digest_size=16).hexdigest()
        return cls(
            task_id=digest_of(prompt, files, check),
            prompt=prompt,
            workspace=dict(workspace),
            verifier=verifier,
            limits=limits or Limits(),
            category=category,
            source=dict(source),
        )


# Episodes


class ToolCall(Noun, frozen=True, kw_only=True):
    """A call as the model wrote it. `error` says why it could not be read; such a call is answered, never dropped.

    >>> ToolCall(name="edit_file", arguments={"path": "solution.py", "old": "<", "new": "<=", "line": 3})
    """

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


class ToolErrorKind(enum.StrEnum):
    """Why a tool call failed. An error is data for the agent; `unknown` is always a bug of ours."""

    INVALID_ARGUMENTS = "invalid_arguments"
    UNEXPECTED_ENVIRONMENT = "unexpected_environment"
    PROVIDER_ERROR = "provider_error"
    USER_ABORTED = "user_aborted"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class ToolResult(Noun, frozen=True, kw_only=True):
    """What the tool answered, as the model reads it."""

    text: str
    error: ToolErrorKind | None = None
    passed: bool | None = None
    """Only from run_tests: whether every visible check passed."""


class StopReason(enum.StrEnum):
    """Why the model stopped writing a turn."""

    END = "end"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"


class Effort(Noun, frozen=True, kw_only=True):
    """What an episode or a turn spent, in tokens unless said otherwise. Effort adds up: `a + b`."""

    thinking_tokens: int = 0
    call_tokens: int = 0
    output_tokens: int = 0
    """Tool output that was read."""
    message_tokens: int = 0
    calls: int = 0
    """Number of tool calls."""
    turns: int = 0

    def __add__(self, other: Effort) -> Effort:
        pairs = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        return Effort(**pairs)


class Span(Noun, frozen=True, kw_only=True):
    """Tokens [start, end) of context number `context` of an episode."""

    context: int
    start: int
    end: int


class Turn(Noun, frozen=True, kw_only=True):
    """One reply of the policy and what its calls gave back. `span` is None for a foreign endpoint's turn."""

    text: str
    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    stop: StopReason
    effort: Effort
    span: Span | None
    wall_s: float


class Opened(enum.StrEnum):
    """Why a context was opened."""

    TASK = "task"
    SUMMARY = "summary"
    RERENDER = "rerender"
    CLIENT_REWRITE = "client_rewrite"
    SUBAGENT = "subagent"
    FORK = "fork"


class KVEpoch(Noun, frozen=True, kw_only=True):
    """Which versions computed the KV that sampled tokens saw.

    Tokens sampled at positions >= `first` saw KV whose entry for position p was computed by the version that `runs`
    gives for p. A re-prefill opens a new epoch.
    """

    first: int
    runs: tuple[Run, ...]


class Routes(Noun, frozen=True, kw_only=True):
    """Chosen experts. Row r belongs to the forward of token r, which predicts token r + 1; rows = len(ids) - 1."""

    experts: np.ndarray
    """[rows, moe_layers, top_k]; uint8 up to 256 experts, else int16."""
    valid: np.ndarray
    """[rows] bool: False where no route was recorded and the trainer's own choice is used."""


class Context(Noun, frozen=True, kw_only=True):
    """One token window, exactly as the engine saw and sampled it.

    >>> Context(ids=np.array([5, 9, 7]), sampled=np.array([False, False, True]), logprobs=np.array([0, 0, -1.2]), ...)
    """

    ids: np.ndarray
    """[n] int32."""
    sampled: np.ndarray
    """[n] bool: True where the policy sampled the token."""
    logprobs: np.ndarray
    """[n] float32, of the full vocabulary at the sampling temperature; 0 where not sampled."""
    versions: tuple[Run, ...]
    """Version that sampled each token, run-length coded over the positions of this context."""
    kv_epochs: tuple[KVEpoch, ...]
    routes: Routes | None
    """None for a model without routed experts."""
    opened: Opened


class Outcome(enum.StrEnum):
    """How an episode ended. All of these are data; a fault is recorded beside them."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """A turn without any call."""
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    TIME_LIMIT = "time_limit"
    SANDBOX_DIED = "sandbox_died"
    """The sandbox died after the agent's first action: the agent's failure, and scored (docs/semantics.md)."""
    FAULT = "fault"
    """A machine broke. Never scored, run again or excluded."""


class Fault(Noun, frozen=True, kw_only=True):
    """A broken machine, named by its boundary: sandbox, engine, reward, store."""

    boundary: str
    message: str


class Episode(Noun, frozen=True, kw_only=True):
    """One attempt at a task. It carries no reward: that is computed from evidence, and can be computed again."""

    episode_id: str
    task_id: str
    contexts: tuple[Context, ...]
    turns: tuple[Turn, ...]
    outcome: Outcome
    patch: str
    """Unified diff of the workspace, empty if nothing changed."""
    files: Mapping[str, str]
    """The workspace's files that changed, as the agent left them: what is graded."""
    effort: Effort
    fault: Fault | None
    timings: Mapping[str, float]
    """Seconds by activity: generate, tools, queue, sandbox."""
    format: int = FORMAT


class Evidence(Noun, frozen=True, kw_only=True):
    """What was found out about an episode. Stored; everything in a reward follows from it."""

    task_id: str
    episode_id: str
    passed: tuple[bool, ...]
    """One entry a check of the verifier, in its order."""
    detail: str
    """For a person: the first failing check, or what went wrong in grading."""
    wall_s: float
    format: int = FORMAT

    @property
    def solved(self) -> bool:
        return bool(self.passed) and all(self.passed)


class Reward(Noun, frozen=True, kw_only=True):
    """`total` is the sum of the named parts.

    >>> Reward(total=0.91, parts={"verify": 1.0, "length": -0.09})
    """

    total: float
    parts: Mapping[str, float]


class Scored(Noun, frozen=True, kw_only=True):
    """An episode with what was found out about it and what that is worth."""

    episode: Episode
    evidence: Evidence
    reward: Reward


class Group(Noun, frozen=True, kw_only=True):
    """Scored episodes that share a baseline: siblings of one task."""

    key: str
    """The prompt's key in the ledger."""
    task_id: str
    members: tuple[Scored, ...]
    faults: tuple[Fault, ...]
    """Of members that stayed missing after every retry."""


# Training


class Origin(Noun, frozen=True, kw_only=True):
    """Where a sample comes from: group key, number of the member in it, number of the context in the episode."""

    key: str
    member: int
    context: int


class Sample(Noun, frozen=True, kw_only=True):
    """One context to train on. `advantage` is the same for all its sampled tokens.

    Row i of the arrays speaks of token i; the loss is taken where `mask` is True.
    """

    ids: np.ndarray
    """[n] int32."""
    mask: np.ndarray
    """[n] bool."""
    logprobs: np.ndarray
    """[n] float32: behaviour log-probs (mu), 0 where mask is False."""
    advantage: float
    versions: tuple[Run, ...]
    kv_epochs: tuple[KVEpoch, ...]
    routes: Routes | None
    origin: Origin


class Batch(Noun, frozen=True, kw_only=True):
    """The samples of one optimizer step, durable before the step is taken.

    `denominator` is Z = groups_per_step * group_size * tokens_per_episode, from the recipe alone.
    """

    step: int
    """The step that this batch makes: weights of step `step - 1` go in, of `step` come out."""
    samples: tuple[Sample, ...]
    denominator: float
    seed: int
    rate: float = 1.0
    """Share of the learning rate that the step is taken at: in the batch, so that a replay takes the same step."""
    format: int = FORMAT


# Weights


class Part(Noun, frozen=True, kw_only=True):
    """A piece of one tensor: elements [offset, offset + count) of `name`, flattened."""

    name: str
    dtype: str
    """safetensors names: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    offset: int
    count: int
    digest: str
    """blake2b-128 of the piece's bytes."""
    blob: str
    """Key of the blob that holds it, or what turns the parent's piece into it; empty: it is the parent's."""
    start: int
    """First byte inside the blob."""
    nbytes: int
    """Bytes in the blob."""


class Manifest(Noun, frozen=True, kw_only=True):
    """A published version. It exists whole or not at all: creating this object is the publish."""

    version: Version
    parent: Version | None
    parts: tuple[Part, ...]
    """All tensors in full; none in a version that can be had from its parent only."""
    changes: tuple[Part, ...]
    """All tensors as differences from the parent's (weights/delta.py); none in a version without a parent."""
    digest: str
    """Of the pieces' digests, in order: names the version's content, however it is stored."""
    nonce: str
    """Tells our own late write from another publisher's."""
    format: int = FORMAT

    @property
    def is_anchor(self) -> bool:
        """Whether it can be had without its parent."""
        return bool(self.parts)
