"""Recipe -> live objects of a command. This, and roles.py for worker processes, is where rooms are wired together.

Everything heavy is imported by the function that needs it, so that checking a recipe loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude import config
from etude.errors import RecipeError, RunError

if TYPE_CHECKING:
    from etude.rl.run_folder import RunFolder
    from etude.rl.stage import RLStage
    from etude.serve.stage import ServeStage
    from etude.train.ranks import Ranks


def stages() -> dict[str, type[Any]]:
    """The stages that a recipe can name."""
    from etude.rl.stage import RLStage
    from etude.serve.stage import ServeStage
    from etude.train.pretrain_recipe import PretrainRecipe, SFTRecipe

    return {"rl": RLStage, "pretrain": PretrainRecipe, "sft": SFTRecipe, "serve": ServeStage}


def load_recipe(path: Path, overrides: Sequence[str], *, stage: str) -> Any:
    """The dataclass of a recipe that must be of this stage. Errors: RecipeError."""
    tree = config.override(config.read_tree(path), overrides)
    if tree.get("stage") != stage:
        raise RecipeError(
            f"{path} has stage = {tree.get('stage')!r}",
            hint=f"`etude {tree.get('stage')} {path}` runs it, or choose another",
        )
    recipe = config.build(tree, stages(), source=str(path))
    if stage == "rl":
        _check_rl(recipe)
    return recipe


def _check_rl(stage: RLStage) -> None:
    """What one section must keep because of another."""
    from etude.rewards.length import validate

    agent = stage.agent
    validate(stage.reward, context_tokens=agent.context_tokens, max_calls=agent.max_calls, max_turns=agent.max_turns)
    if stage.weights.store.startswith("memory:"):
        raise RecipeError(
            f"weights.store = {stage.weights.store!r} is each process's own",
            cause="trainer and engines are processes",
            hint="file://{run}/weights, or s3://bucket/path",
        )
    if "run_tests" not in agent.tools:
        raise RecipeError(
            f"agent.tools = {list(agent.tools)} lacks run_tests",
            cause="the control measures the start barred from finishing until a test passes",
        )
    if agent.finish_needs_pass:
        raise RecipeError(
            "agent.finish_needs_pass = true would hold in training alone",
            cause="measurements set it themselves: true for the control, false for the others",
        )
    if stage.rl.group_size > agent.max_episodes:
        raise RecipeError(
            f"rl.group_size = {stage.rl.group_size} exceeds agent.max_episodes = {agent.max_episodes}",
            cause="a group's episodes run side by side",
        )


def saved_recipe(run: Path) -> RLStage:
    """The resolved recipe of a run with stage rl."""
    stage: RLStage = load_recipe(run / "recipe.toml", [], stage="rl")
    return stage


def saved_stage(run: Path) -> RLStage | ServeStage:
    """The resolved recipe that a worker process is to serve a part of."""
    found: RLStage | ServeStage = load_recipe(
        run / "recipe.toml", [], stage="serve" if config.read_tree(run / "recipe.toml")["stage"] == "serve" else "rl"
    )
    return found


def store_url(run: Path) -> str:
    """Where a run publishes its versions."""
    return saved_recipe(run).weights.url(run)


# The orchestrator of a run


def run_rl(folder: RunFolder, stage: RLStage, *, started: float) -> dict[str, Any]:
    """Go through the run's phases; returns its result. KeyboardInterrupt stops it cleanly: call it again to go on."""
    with folder.lock():
        result = asyncio.run(_run_rl(folder, stage, started))
        from etude.report.html import build_report

        build_report(folder.path)
        return result


def resume_run(run: Path) -> dict[str, Any]:
    """Go on with a run from its own saved recipe. A finished run just gives its result."""
    import time

    from etude.rl.run_folder import RunFolder

    return run_rl(RunFolder.open(run), saved_recipe(run), started=time.time())


async def _run_rl(folder: RunFolder, stage: RLStage, started: float) -> dict[str, Any]:
    from etude.agent.mcp import Servers
    from etude.agent.policy import TokenLimits, engine_policies, task_renderers
    from etude.agent.runner import Runner
    from etude.data.formats import ChatFormat
    from etude.metrics import JsonlRecorder
    from etude.models.recipe import model_folder
    from etude.rewards.combine import score
    from etude.rewards.verify import collect
    from etude.rl.engines import EngineSet, ManagedEngine
    from etude.rl.phases import Parts, run_phases
    from etude.rl.processes import Workers
    from etude.rl.trainer_handle import ManagedTrainer
    from etude.sandbox.memo import MemoPool
    from etude.sandbox.pool import NamespacePool
    from etude.tasks.file import load_tasks
    from etude.tasks.rates import choose, load_rates
    from etude.weights.store import open_store

    train_tasks, heldout_tasks = load_tasks(stage.tasks.train), load_tasks(stage.tasks.heldout)
    if stage.tasks.solve_rate != (0.0, 1.0):
        train_tasks = choose(train_tasks, load_rates(stage.tasks.rates), stage.tasks.solve_rate)
    store = open_store(stage.weights.url(folder.path))
    workers = Workers(folder.path)
    recorder = JsonlRecorder(folder.path / "metrics.jsonl")
    try:
        async with NamespacePool(stage.sandbox) as sandboxes:
            pool = MemoPool(sandboxes)
            servers = await Servers.describe(stage.agent.mcp, sandboxes)
            chat = ChatFormat(model_folder(stage.model.path), thinking=stage.agent.thinking)
            renderer_of = task_renderers(chat.renderer, stage.agent, servers.schemas())
            for task in (*train_tasks, *heldout_tasks):
                renderer_of(task)  # tools that cannot be had are found before anything is trained
            engine = EngineSet([ManagedEngine(workers, f"engine-{n}") for n in range(stage.engine.replicas)])
            limits = TokenLimits(context_tokens=stage.agent.context_tokens, reply_tokens=stage.agent.reply_tokens)
            runner = Runner(
                pool=pool,
                make_policy=engine_policies(engine, renderer_of, limits),
                recipe=stage.agent,
                collect=collect,
                score=functools.partial(score, recipe=stage.reward),
                infra_retries=stage.rl.infra_retries,
                seed=stage.rl.seed,
                servers=servers,
            )
            parts = Parts(
                folder=folder, stage=stage, workers=workers, store=store, pool=pool, renderer_of=renderer_of,
                engine=engine, trainer=ManagedTrainer(workers, store), runner=runner, servers=servers,
                train_tasks=train_tasks, heldout_tasks=heldout_tasks, recorder=recorder,
            )  # fmt: skip
            return await run_phases(parts, started=started)
    finally:
        await workers.close()
        recorder.close()


def check_run(run: Path, *, only: str | None = None, replay: bool = False) -> dict[str, list[str]]:
    """Problems by check, read from the run's files alone. `replay` trains every batch again.

    Errors: RunError for an unknown check.
    """
    from etude.rl.audit import audit_run

    problems = audit_run(run, store_url(run), only=only)
    return problems | {"replay": _retrain(run)} if replay else problems


def measure_policy(run: Path) -> list[dict[str, Any]]:
    """How far trainer and engine were one policy: lines with name, value, count, p50, p99."""
    from etude.rl.audit import measure_policy
    from etude.rl.run_folder import RunFolder

    return [dataclasses.asdict(measure) for measure in measure_policy(RunFolder.open(run))]


def _retrain(run: Path) -> list[str]:
    from etude.metrics import progress
    from etude.rl.retrain import retrain
    from etude.rl.run_folder import RunFolder
    from etude.roles import new_trainer
    from etude.train.lead import Lead
    from etude.train.ranks import together
    from etude.train.reference import pinned_reference
    from etude.weights.manifests import read_manifest
    from etude.weights.replica import fetch
    from etude.weights.store import open_store

    stage, folder = saved_recipe(run), RunFolder.open(run)
    if folder.phase not in ("after", "done"):
        raise RunError(f"{run} is not trained to its end", hint=f"go on: etude runs resume {run.name}")
    store = open_store(stage.weights.url(run))
    published = fetch(store, read_manifest(store, *folder.info()["end_version"]))
    with (
        together(stage.train.ranks, _follow_retraining, run) as ranks,
        progress("train again", total=folder.info()["steps"]) as bar,
    ):
        trainer = Lead(new_trainer(stage, ranks))
        if stage.rl.kl.coef:
            trainer.set_reference(pinned_reference(store, stage.rl.kl.reference))
        try:
            return retrain(
                folder, trainer, published=published, progress=lambda done, total: bar.advance(),
                weights=lambda: {name: stored.array for name, stored in trainer.published().items()},
            )  # fmt: skip
        finally:
            trainer.close()


def _follow_retraining(ranks: Ranks, run: Path) -> None:
    from etude.roles import new_trainer
    from etude.train.lead import follow

    follow(new_trainer(saved_recipe(run), ranks))


# Other commands


def build_tasks(overrides: Sequence[str]) -> dict[str, int]:
    """Build the repair tasks; returns counts by split. Errors: RecipeError, TaskError, SandboxError."""
    from etude.tasks.build import build
    from etude.tasks.recipe import TasksBuildRecipe

    recipe = config.convert(config.override({}, overrides), TasksBuildRecipe, where="tasks build")
    with _bars() as report:
        return dict(build(recipe, report).counts)


def write_functions(path: Path, overrides: Sequence[str]) -> dict[str, int]:
    """Harvest the pinned packages' functions into `path`; returns counts by split. Errors: RecipeError, TaskError."""
    from etude.tasks import build
    from etude.tasks.recipe import TasksBuildRecipe

    recipe = config.convert(config.override({}, overrides), TasksBuildRecipe, where="tasks functions")
    with _bars() as report:
        return build.write_functions(recipe, path, report)


def write_run_rates(run: Path, out: Path) -> dict[str, int]:
    """What a run's first measurement says of each task, for `tasks.rates`; returns tasks by solved attempts.

    Errors: RunError if the run has not measured its start.
    """
    from etude.bench.suite import SuiteResult
    from etude.frames import read_file
    from etude.tasks.rates import Rates, write_rates

    path = run / "evals" / "before.mp"
    if not path.is_file():
        raise RunError(f"{run} has not measured its start", hint="`etude rl` measures tasks.heldout first")
    stage, result = saved_recipe(run), read_file(path, SuiteResult)
    solved = {task.task_id: task.num_solved for task in result.tasks if len(task.attempts) >= result.k}
    write_rates(out, Rates(tasks=stage.tasks.heldout, model=stage.model.path, k=result.k, solved=solved))
    return {f"{number} of {result.k}": list(solved.values()).count(number) for number in range(result.k + 1)}


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A callback of (stage, done, total) that shows a progress bar for each stage."""
    from etude.metrics import progress

    with contextlib.ExitStack() as stack:
        bars: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = [stack.enter_context(progress(stage, total)), 0]
            bar, before = bars[stage]
            bar.advance(done - before)
            bars[stage][1] = done

        yield report


def check_task_file(address: str, limit: int | None) -> list[str]:
    """What is wrong with a file's tasks, a line each."""
    from etude.metrics import progress
    from etude.sandbox.pool import NamespacePool
    from etude.sandbox.recipe import SandboxRecipe
    from etude.tasks.check import check_tasks
    from etude.tasks.file import load_references, load_tasks

    tasks, references = load_tasks(address)[:limit], load_references(address)

    async def check() -> list[str]:
        async with NamespacePool(SandboxRecipe()) as pool:
            with progress("check", total=len(tasks)) as bar:
                found = await check_tasks(tasks, references, pool, progress=lambda done, total: bar.advance())
        return [f"{violation.task_id}: {violation.problem}: {violation.detail}" for violation in found]

    return asyncio.run(check())


def examine() -> list[dict[str, str]]:
    """What `etude doctor` prints: findings with name, state (ok, note, missing), text and fix."""
    from etude.rl.machine import machine_findings
    from etude.sandbox.probe import probe

    sandbox = [
        {
            "name": f"sandbox: {finding.name}",
            "state": "ok" if finding.ok else "missing",
            "text": finding.cause,
            "fix": finding.fix,
        }
        for finding in probe()
    ]
    return [*(dataclasses.asdict(finding) for finding in machine_findings()), *sandbox]
