"""Which episodes the report shows, and each as plain text pieces for the page's template.

A reader should see the same task before and after training, and should not be shown the best cases alone: tasks are
chosen by how their solve rate changed (improved, worsened, solved all along, never solved), and of each occasion the
first episode on disk is shown, plus the first with the other outcome.

Everything here was written by a model or ran in a sandbox, so it is hostile: texts are cut, and characters that could
hide or reorder others are made visible. Escaping is the template's work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.code.diff import unified_diff
from etude.code.view import split_lines
from etude.data.episodes import EpisodeRecord, read_episodes
from etude.types import Task, ToolCall, ToolResult, Turn

MAX_CHARS = 4_000
"""Of one text (a file, a reply, a result): more is cut, and the page says so."""
MAX_TURNS = 60
SHARES = {"improved": 10, "worsened": 5, "solved": 4, "unsolved": 5}
"""How many tasks of each kind of change are shown at most."""
OCCASIONS = ("before", "after", "control", "train")


@dataclass(slots=True)
class Tally:
    """Attempts at one task on one occasion."""

    solved: int = 0
    total: int = 0
    shown: list[EpisodeRecord] = field(default_factory=list)

    def add(self, record: EpisodeRecord) -> None:
        solved = record.scored.evidence.solved
        self.solved += solved
        self.total += 1
        if all(solved != other.scored.evidence.solved for other in self.shown):
            self.shown.append(record)

    @property
    def rate(self) -> float:
        return self.solved / self.total


@dataclass(slots=True)
class Seen:
    """One task and all attempts at it."""

    task: Task
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def change(self) -> str:
        """improved, worsened, solved, unsolved, or mixed (the same rate before and after)."""
        rates = [tally.rate for when in ("before", "after") if (tally := self.tallies.get(when))]
        if not rates:
            rates = [tally.rate for tally in self.tallies.values()]
        if rates[-1] != rates[0]:
            return "improved" if rates[-1] > rates[0] else "worsened"
        return {0.0: "unsolved", 1.0: "solved"}.get(rates[0], "mixed")

    @property
    def gain(self) -> float:
        before, after = self.tallies.get("before"), self.tallies.get("after")
        return after.rate - before.rate if before and after else 0.0


def choose(folder: Path) -> list[Seen]:
    """The tasks to show, in the order to show them. Without evaluation on disk, the first tasks of training.

    Errors: StoreError if a segment is damaged.
    """
    seen: dict[str, Seen] = {}
    for when in ("before", "after", "control"):
        _collect(seen, read_episodes(folder, when=when), limit=None)
    if not seen:
        _collect(seen, read_episodes(folder, when="train"), limit=sum(SHARES.values()))
        return list(seen.values())
    complete = [item for item in seen.values() if {"before", "after"} <= item.tallies.keys()] or list(seen.values())
    chosen = []
    for change, share in SHARES.items():
        alike = [item for item in complete if item.change == change]
        alike.sort(key=lambda item: (-abs(item.gain), item.task.task_id))
        chosen += alike[:share]
    return chosen or complete[: sum(SHARES.values())]


def _collect(seen: dict[str, Seen], records: Iterable[EpisodeRecord], limit: int | None) -> None:
    for record in records:
        item = seen.get(record.task.task_id)
        if item is None:
            if limit is not None and len(seen) >= limit:
                continue
            item = seen[record.task.task_id] = Seen(task=record.task)
        item.tallies.setdefault(record.when, Tally()).add(record)


# As text


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file or a diff. `kind`: add, del, hunk, or empty."""

    kind: str
    text: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class CallView:
    """A call with its answer. `edit` holds the lines taken out and put in, if it is an edit."""

    name: str
    arguments: list[tuple[str, str]]
    edit: list[Line]
    error: str
    result: str
    verdict: str
    """pass, fail, error, or empty."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """One reply of the agent, with its calls."""

    number: int
    text: str
    calls: list[CallView]
    stop: str


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One attempt."""

    when: str
    solved: bool
    outcome: str
    facts: list[str]
    reward: str
    parts: list[tuple[str, str]]
    checks: str
    detail: str
    turns: list[TurnView]
    more_turns: int
    diff: list[Line]
    fault: str


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task: its prompt, files, and attempts."""

    task_id: str
    title: str
    origin: str
    change: str
    counts: list[tuple[str, int, int]]
    """(occasion, solved, attempts)."""
    prompt: str
    files: list[tuple[str, list[Line]]]
    attempts: list[list[EpisodeView]]
    """A list for each occasion."""


def view(seen: Seen) -> TaskView:
    """All that the page shows of a task."""
    task = seen.task
    tallies = {when: seen.tallies[when] for when in OCCASIONS if when in seen.tallies}
    origin = ", ".join(clean(text) for key in ("package", "fault") if (text := task.source.get(key)))
    return TaskView(
        task_id=task.task_id[:12],
        title=clean(task.prompt.strip().split("\n")[0])[:120],
        origin=origin,
        change=seen.change,
        counts=[(when, tally.solved, tally.total) for when, tally in tallies.items()],
        prompt=clean(task.prompt),
        files=[(clean(path), _numbered(text)) for path, text in sorted(task.workspace.items())],
        attempts=[[_episode(record) for record in tally.shown] for tally in tallies.values()],
    )


def _episode(record: EpisodeRecord) -> EpisodeView:
    episode, evidence, reward = record.scored.episode, record.scored.evidence, record.scored.reward
    effort = episode.effort
    sampled = effort.thinking_tokens + effort.call_tokens + effort.message_tokens
    facts = [f"{len(episode.turns)} turns", f"{effort.calls} calls", f"{sampled} tokens"]
    if record.step is not None:
        facts.append(f"step {record.step}")
    patch = episode.patch or unified_diff(_before(record, episode.files), episode.files)
    return EpisodeView(
        when=record.when,
        solved=evidence.solved,
        outcome=str(episode.outcome).replace("_", " "),
        facts=facts,
        reward=f"{reward.total:+.3f}",
        parts=[(clean(name), f"{value:+.3f}") for name, value in reward.parts.items()],
        checks=f"{sum(evidence.passed)} of {len(evidence.passed)} checks pass",
        detail=clean(evidence.detail),
        turns=[_turn(number, turn) for number, turn in enumerate(episode.turns[:MAX_TURNS], start=1)],
        more_turns=max(0, len(episode.turns) - MAX_TURNS),
        diff=_diff(patch),
        fault="" if episode.fault is None else clean(f"{episode.fault.boundary}: {episode.fault.message}"),
    )


def _before(record: EpisodeRecord, files: Mapping[str, str]) -> dict[str, str]:
    return {path: record.task.workspace[path] for path in files if path in record.task.workspace}


def _turn(number: int, turn: Turn) -> TurnView:
    results: list[ToolResult | None] = [*turn.results]
    results += [None] * (len(turn.calls) - len(results))
    calls = [_call(call, result) for call, result in zip(turn.calls, results, strict=False)]
    return TurnView(number=number, text=clean(turn.text.strip()), calls=calls, stop=str(turn.stop))


def _call(call: ToolCall, result: ToolResult | None) -> CallView:
    arguments = {clean(str(name)): clean(str(value)) for name, value in call.arguments.items()}
    edit: list[Line] = []
    if call.name == "edit_file" and {"old", "new"} <= arguments.keys():
        edit = [Line("del", line) for line in split_lines(arguments.pop("old"))]
        edit += [Line("add", line) for line in split_lines(arguments.pop("new"))]
    verdict = ""
    if result is not None:
        verdict = "error" if result.error else {True: "pass", False: "fail", None: ""}[result.passed]
    return CallView(
        name=clean(call.name),
        arguments=list(arguments.items()),
        edit=edit,
        error=clean(call.error or ""),
        result="no answer" if result is None else clean(result.text.rstrip("\n")),
        verdict=verdict,
    )


def _numbered(text: str) -> list[Line]:
    return [Line("", line, number) for number, line in enumerate(split_lines(clean(text)), start=1)]


def _diff(patch: str) -> list[Line]:
    """The patch's lines by kind."""
    lines = []
    in_head = False
    for line in split_lines(clean(patch)):
        in_head = line.startswith("diff --git ") or (in_head and not line.startswith("@@"))
        kind = "head" if in_head else {"+": "add", "-": "del", "@": "hunk"}.get(line[:1], "")
        lines.append(Line(kind, line))
    return lines


_HIDING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def clean(text: str) -> str:
    """At most MAX_CHARS; control, zero-width, reordering and unpaired characters as `<U+202E>`."""
    cut = len(text) - MAX_CHARS
    if cut > 0:
        text = f"{text[:MAX_CHARS]}\n... {cut} more characters are not shown"
    return _HIDING.sub(lambda found: f"<U+{ord(found.group()):04X}>", text)
