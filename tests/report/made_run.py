"""A run's folder as the loop leaves it, for the tests of the report: real files, made-up numbers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from etude.code.diff import unified_diff
from etude.data.episodes import EpisodeRecord, EpisodeWriter
from etude.metrics import JsonlRecorder
from etude.types import (
    Effort,
    Episode,
    Evidence,
    IOCheck,
    IOChecks,
    Outcome,
    Reward,
    Scored,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Turn,
)

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{ 7*7 }}"
"""Must never be anything but text in a report."""
SOURCE = """\
def clamp(value, low, high):
    '''Keep value inside.'''
    if value < low:
        return high
    return min(value, high)
"""
RESULT = {
    "before": {"pass1": 0.283, "pass8": 0.581, "n": 400, "k": 8, "distinct": 1.31, "tokens": 96.0},
    "control": {"pass1": 0.365, "pass8": 0.587, "n": 400, "k": 8, "distinct": 1.34, "tokens": 141.0},
    "after": {"pass1": 0.412, "pass8": 0.602, "n": 400, "k": 8, "distinct": 1.29, "tokens": 127.0},
    "gain": 0.129,
    "gain_ci95": [0.096, 0.162],
    "gain_over_control": 0.047,
    "gain_over_control_ci95": [0.018, 0.076],
    "wall_s": 512.0,
    "steps": 60,
    "report": "runs/quickstart/report.html",
}


def task(number: int, text: str = "") -> Task:
    """A repair task with a workspace of one file."""
    checks = (IOCheck(call="clamp(7, 0, 5)", expected="5", visible=True),)
    return Task.make(
        prompt=f"Repair clamp{number}.{text}",
        workspace={"solution.py": SOURCE + (f"# {text}\n" if text else "")},
        verifier=IOChecks(path="solution.py", checks=checks),
        category="repair",
        source={"package": "toolz", "fault": "wrong return" + text},
    )


def scored(of: Task, name: str, *, solved: bool, text: str = "") -> Scored:
    """An attempt: a wrong edit, a failing test, and, if solved, the right edit."""
    edit = {"path": "solution.py", "old": "return high", "new": "return low", "line": 4}
    turns = [_turn(ToolCall(name="run_tests", arguments={}), _failed(text), "Let me see what fails." + text)]
    turns.append(
        _turn(ToolCall(name="edit_file", arguments={**edit, "new": "return value" + text}), ToolResult(text="ok"))
    )
    turns.append(_turn(ToolCall(name="run_tests", arguments={}), _failed(text)))
    fixed = SOURCE
    if solved:
        turns.append(_turn(ToolCall(name="edit_file", arguments=edit), ToolResult(text="ok")))
        turns.append(_turn(ToolCall(name="run_tests", arguments={}), ToolResult(text="ok", passed=True)))
        fixed = SOURCE.replace("return high\n", "return low\n")
    turns.append(_turn(ToolCall(name="finish", arguments={"message": "done" + text}), ToolResult(text="")))
    files = {"solution.py": fixed + text}
    episode = Episode(
        episode_id=name,
        task_id=of.task_id,
        contexts=(),
        turns=tuple(turns),
        outcome=Outcome.FINISHED,
        patch=unified_diff(dict(of.workspace), files),
        files=files,
        effort=Effort(call_tokens=24 * len(turns), calls=len(turns), turns=len(turns)),
        fault=None,
        timings={"generate": 1.2, "tools": 0.1},
    )
    evidence = Evidence(
        task_id=of.task_id,
        episode_id=name,
        passed=(True, solved),
        detail="" if solved else f"clamp(-1, 0, 5) -> 5{text}",
        wall_s=0.1,
    )
    cost = -0.03 * math.log1p(len(turns))
    return Scored(
        episode=episode,
        evidence=evidence,
        reward=Reward(total=solved + cost, parts={"verify": float(solved), "length": cost}),
    )


def _turn(call: ToolCall, result: ToolResult, text: str = "") -> Turn:
    effort = Effort(call_tokens=24, calls=1, turns=1)
    return Turn(text=text, calls=(call,), results=(result,), stop=StopReason.END, effort=effort, span=None, wall_s=0.3)


def _failed(text: str) -> ToolResult:
    return ToolResult(text=f"clamp(-1, 0, 5) -> 5, expected 0\n1 of 2 fail{text}", passed=False)


def begin(folder: Path) -> Path:
    """A run that has just been made."""
    (folder / "episodes").mkdir(parents=True)
    info = {
        "format": 1,
        "name": folder.name,
        "stage": "rl",
        "phase": "train",
        "seed": 0,
        "created": 1e9,
        "git": "0123456789ab",
    }
    versions = {"etude": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}
    (folder / "run.json").write_text(json.dumps(info | {"versions": versions, "machine": "2 cores, x86_64"}))
    (folder / "recipe.toml").write_text('format = 1\nstage = "rl"\n\n[model]\npath = "etude-nano"\n')
    return folder


def record_steps(folder: Path, count: int = 60) -> None:
    """Metrics rows of `count` steps."""
    chance = random.Random(0)
    recorder = JsonlRecorder(folder / "metrics.jsonl")
    for step in range(1, count + 1):
        solved = 0.3 + 0.18 * (1 - math.exp(-step / 15)) + chance.gauss(0, 0.03)
        row = {
            "step": step,
            "wall_s": 5.3 * step,
            "reward_mean": solved - 0.06,
            "solve_rate": solved,
            "turns_mean": 4 + step / 40 + chance.gauss(0, 0.1),
            "sampled_tokens_mean": 96 + step / 2 + chance.gauss(0, 3),
            "staleness_mean": 0.9,
            "staleness_max": 2,
            "staleness_0": 4,
            "staleness_1": 13,
            "staleness_2": 3,
            "groups": 20,
            "zero_variance_groups": 8 + chance.randrange(4),
            "wait_s": 3.1 * step,
            "train_s": 2.2 * step,
            "engine_sampled_tokens": 16_000 * step,
            "engine_busy_s": 40 + 4.9 * step,
            "episode_generate_s": 2 + chance.random(),
            "episode_tools_s": 0.2,
            "episode_sandbox_s": 0.05,
            "episode_grade_s": 0.1,
            "loss": chance.gauss(0, 0.02),
            "grad_norm": 0.4 + 0.1 * chance.random(),
            "entropy": 0.5 - step / 400,
            "mismatch_p99": 2e-5 * (1 + chance.random()),
            "mismatch_live_mean": 4e-6 * (1 + chance.random()),
            "off_policy_ratio_mean": 1 + chance.gauss(0, 0.002),
            "off_policy_ratio_p99": 1.1 + chance.gauss(0, 0.02),
        }
        recorder.record("step", row)
    recorder.record("time", {"setup_s": 16.0, "before_s": 74.0, "train_s": 318.0, "after_s": 81.0})
    recorder.close()


def record_episodes(folder: Path, tasks: int = 6, text: str = "") -> None:
    """Episodes before and after training; the first task improves, the last worsens."""
    writer = EpisodeWriter(folder / "episodes")
    for when in ("before", "after", "control"):
        for number in range(tasks):
            of = task(number, text)
            for attempt in range(4):
                good = {"before": 1, "after": 3, "control": 2}[when] if number < tasks - 1 else 4 * (when == "before")
                name = f"{when}-{number}-{attempt}"
                attempt_scored = scored(of, name, solved=attempt >= 4 - good, text=text)
                writer.append(
                    EpisodeRecord(task=of, scored=attempt_scored, when=when, step=0 if when != "after" else 60)
                )
    writer.close()


def finish(folder: Path) -> None:
    """The result of a run that ended."""
    (folder / "result.json").write_text(json.dumps(RESULT))
