"""A whole run: measure the start, train, measure the end, and write down what was gained.

    before   the starting version, and the same version barred from finishing until a test passes (what persistence
             alone is worth), on held-out tasks at a fixed budget of sampled tokens
    train    loop.py, until the clock or the epoch ends; with `eval.every`, measured on the way
    after    the last version, on the same tasks with the same seeds
    done     result.json

Each phase leaves a file; a run that was cut begins its phase again, nothing else. Measurements use engines of their
own that follow nobody: the version is loaded by name. What it does not do: statistics (bench), or pages (report).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.agent.mcp import Servers
from etude.bench.compare import Row, compare, row_of
from etude.bench.suite import SuiteResult, run_suite
from etude.data.episodes import EpisodeRecord, EpisodeWriter
from etude.data.render import Renderer
from etude.frames import read_file, write_bytes, write_file
from etude.killpoints import reach
from etude.metrics import ConsoleRecorder, Tee, progress
from etude.protocols import Recorder, SandboxPool
from etude.rl.engines import EngineSet, ManagedEngine
from etude.rl.ledger import Ledger
from etude.rl.loop import GroupRunner, Loop
from etude.rl.processes import Workers
from etude.rl.run_folder import RunFolder
from etude.rl.stage import RLStage
from etude.rl.trainer_handle import ManagedTrainer
from etude.types import Manifest, Scored, Task, Version, digest_of
from etude.weights.manifests import read_manifest
from etude.weights.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The live objects of a run; build.py makes them."""

    folder: RunFolder
    stage: RLStage
    workers: Workers
    store: Store
    pool: SandboxPool
    renderer_of: Callable[[Task], Renderer]
    engine: EngineSet
    trainer: ManagedTrainer
    runner: GroupRunner
    servers: Servers
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    recorder: Recorder


async def run_phases(parts: Parts, *, started: float) -> dict[str, Any]:
    """Go through the phases that are left; returns the result. `started` is a time.time() that wall_s counts from.

    Cancel it to stop: the same call on the same folder goes on.
    """
    folder = parts.folder
    seconds: dict[str, float] = {"setup": time.time() - started}
    if folder.phase in ("new", "before", "train"):
        await parts.trainer.start()
    if folder.phase in ("new", "before"):
        # Again after a kill: a new incarnation of the same weights, and the old one's version may be gone.
        folder.update(phase="before", start_version=[parts.trainer.version.incarnation, parts.trainer.version.n])
        start = _manifest(parts, folder.info()["start_version"])
        with _timed(seconds, "before"):
            await _measure(parts, start, {"before": False, "control": True})
        folder.update(phase="train")
    if folder.phase == "train":
        with _timed(seconds, "train"):
            version = await _train(parts)
        folder.update(phase="after", end_version=[version.incarnation, version.n], steps=version.step)
    if folder.phase == "after":
        end = _manifest(parts, folder.info()["end_version"])
        with _timed(seconds, "after"):
            await _measure(parts, end, {"after": False})
        result = _result(parts, wall_s=time.time() - started)
        parts.recorder.record("time", {f"{name}_s": value for name, value in seconds.items()})
        write_bytes(folder.path / "result.json", json.dumps(result, indent=2).encode())
        folder.update(phase="done")
    return dict(json.loads((folder.path / "result.json").read_text()))


def _manifest(parts: Parts, name: Sequence[int]) -> Manifest:
    return read_manifest(parts.store, *name)


async def _train(parts: Parts) -> Version:
    """Train until the budget or the epoch ends; returns the last version, published and checkpointed.

    With `eval.every`, training stands still at every so many steps and the version of that step is measured.
    """
    ledger = Ledger(parts.folder.path / "ledger.sqlite")
    every, steps = parts.stage.eval.every, parts.stage.budget.steps
    try:
        ledger.enroll([task.task_id for task in _order(parts.train_tasks, parts.stage.rl.seed)])
        step = parts.trainer.step
        if every and step and step % every == 0 and step != steps:  # perhaps cut while it was measured
            await _measure_step(parts, parts.trainer.version)
        while True:
            await parts.engine.start()
            stop = (parts.trainer.step // every + 1) * every if every else None
            step = await _train_until(parts, ledger, stop)
            version = (await parts.trainer.finish()).version
            if stop is None or step != stop or step == steps:
                return version
            await parts.engine.stop()
            await _measure_step(parts, version)
    finally:
        ledger.close()
        await parts.engine.stop()


async def _measure_step(parts: Parts, version: Version) -> None:
    """On the way; nothing if that was done."""
    await _measure(parts, _manifest(parts, [version.incarnation, version.n]), {f"step-{version.step}": False})


async def _train_until(parts: Parts, ledger: Ledger, stop: int | None) -> int:
    """Train until step `stop` or the end of the budget or the epoch; returns the step reached."""
    with ConsoleRecorder(parts.stage.budget.wall_s) as console:
        loop = Loop(
            folder=parts.folder,
            recipe=parts.stage.rl,
            budget=parts.stage.budget,
            until=stop,
            tasks={task.task_id: task for task in parts.train_tasks},
            ledger=ledger,
            runner=parts.runner,
            engine=parts.engine,
            trainer=parts.trainer,
            recorder=Tee(parts.recorder, console),
        )
        return await loop.run()


def _order(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The order of drawing: shuffled, and the same whenever the run is resumed."""
    return sorted(tasks, key=lambda task: digest_of(str(seed), task.task_id))


async def _measure(parts: Parts, manifest: Manifest, labels: dict[str, bool]) -> None:
    """Evaluate one version under each label that has no file yet; the value says whether finishing needs a pass."""
    stage = parts.stage
    missing = {label: barred for label, barred in labels.items() if not _file(parts.folder, label).is_file()}
    if not missing:
        return
    engines = EngineSet(
        [ManagedEngine(parts.workers, f"eval-{number}", manifest=manifest) for number in range(stage.eval.engines)]
    )
    writer = EpisodeWriter(parts.folder.path / "episodes")
    try:
        await engines.start()
        tasks = parts.heldout_tasks[: stage.eval.tasks]
        for label, barred in missing.items():
            k = (stage.eval.control_k or stage.eval.k) if barred else stage.eval.k
            with progress(f"measure {label}", total=len(tasks) * k) as bar:
                result = await run_suite(
                    tasks,
                    label=label,
                    engine=engines,
                    renderer_of=parts.renderer_of,
                    pool=parts.pool,
                    agent=stage.agent,
                    evaluation=dataclasses.replace(stage.eval, k=k),
                    reward=stage.reward,
                    version=manifest.version,
                    finish_needs_pass=barred,
                    infra_retries=stage.rl.infra_retries,
                    servers=parts.servers,
                    progress=lambda done, total, solved: bar.advance(),
                    on_episode=_keeper(writer, tasks, label.partition("-")[0], manifest.version.step),
                )
            row: dict[str, Any] = {"when": label, "step": manifest.version.step, **_measured(row_of(result))}
            write_file(_file(parts.folder, label), result)
            reach("eval-written")
            parts.recorder.record("eval", row)
            ConsoleRecorder(None).record("eval", row)
    finally:
        writer.close()
        await engines.stop()


def _file(folder: RunFolder, label: str) -> Path:
    return folder.path / "evals" / f"{label}.mp"


def _keeper(writer: EpisodeWriter, tasks: Sequence[Task], label: str, step: int) -> Callable[[int, Scored], None]:
    """Keep the first attempt at every task for the report."""
    by_id = {task.task_id: task for task in tasks}

    def keep(number: int, scored: Scored) -> None:
        if number == 0:
            record = EpisodeRecord(task=by_id[scored.episode.task_id], scored=scored, when=label, step=step)
            writer.append(record)

    return keep


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[name] = time.monotonic() - start


def _result(parts: Parts, *, wall_s: float) -> dict[str, Any]:
    """The numbers of result.json; report/result.py documents them."""
    results = {label: read_file(_file(parts.folder, label), SuiteResult) for label in ("before", "control", "after")}
    table = compare([results["before"], results["control"], results["after"]])
    over_control = compare([results["control"], results["after"]])
    body: dict[str, Any] = {row.label: _measured(row) for row in table.rows}
    gain = next(gain for gain in table.gains if gain.after == "after")
    persistence = over_control.gains[0]
    body |= {
        "gain": gain.pass_at_1.value,
        "gain_ci95": [gain.pass_at_1.low, gain.pass_at_1.high],
        "gain_ci95_by_package": [gain.pass_at_1_by_package.low, gain.pass_at_1_by_package.high],
        "gain_passk": gain.pass_at_k.value,
        "gain_passk_ci95": [gain.pass_at_k.low, gain.pass_at_k.high],
        "gain_over_control": persistence.pass_at_1.value,
        "gain_over_control_ci95": [persistence.pass_at_1.low, persistence.pass_at_1.high],
        "tasks_left_out": table.num_left_out,
        "steps": parts.folder.info()["steps"],
        "wall_s": wall_s,
        "report": str(parts.folder.path / "report.html"),
    }
    return body


def _measured(row: Row) -> dict[str, Any]:
    return {
        "pass1": row.pass_at_1,
        "pass8": row.pass_at_8,
        "passk": row.pass_at_k,
        "k": row.k,
        "n": row.num_tasks,
        "distinct": row.distinct_correct,
        "tokens": row.sampled_tokens,
        "turns": row.turns,
        "calls": row.calls,
    }
