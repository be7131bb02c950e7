import asyncio
from pathlib import Path
from typing import Any

import pytest

from etude.errors import RecipeError
from etude.frames import read_file
from etude.rl.ledger import Ledger
from etude.rl.loop import Loop
from etude.rl.recipe import BudgetRecipe, RLRecipe
from etude.rl.run_folder import RunFolder
from etude.types import Batch, IOChecks, Task
from rl.simulated import SimulatedEngine, SimulatedRunner, SimulatedTrainer


class Rows:
    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def record(self, kind: str, row: Any) -> None:
        self.rows.append((kind, dict(row)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for name, row in self.rows if name == kind]


def a_task(number: int) -> Task:
    verifier = IOChecks(path="solution.py", checks=())
    return Task.make(prompt=f"task {number}", workspace={}, verifier=verifier, category="repair", source={})


TASKS = {task.task_id: task for task in (a_task(number) for number in range(60))}
STUCK = next(iter(TASKS))


class Bench:
    """A run folder with a loop over simulated workers."""

    def __init__(self, tmp_path: Path, trainer: SimulatedTrainer | None = None, **dials: Any) -> None:
        path = tmp_path / "run"
        dials = {"groups_per_step": 4, "group_size": 2, "min_group": 2, "max_staleness": 1} | dials
        self.recipe = RLRecipe(**dials)
        self.folder = RunFolder(path) if path.exists() else RunFolder.create(path, stage="rl", recipe={}, seed=0)
        self.ledger = Ledger(path / "ledger.sqlite")
        self.ledger.enroll(list(TASKS))
        self.trainer = trainer or SimulatedTrainer()
        self.engine = SimulatedEngine(self.trainer)
        self.rows = Rows()

    def run(
        self,
        *,
        steps: int | None = None,
        until: int | None = None,
        wall_s: float = 60.0,
        decay_share: float = 0.0,
        stop_after_s: float | None = None,
        **runner: Any,
    ) -> int:
        budget = BudgetRecipe(wall_s=wall_s, steps=steps, decay_share=decay_share)

        async def main() -> int:
            loop = Loop(
                folder=self.folder, recipe=self.recipe, budget=budget, until=until, tasks=TASKS,
                ledger=self.ledger, runner=SimulatedRunner(self.engine, **runner), engine=self.engine,
                trainer=self.trainer, recorder=self.rows, watchdog_s=0.2,
            )  # fmt: skip
            return await asyncio.wait_for(loop.run(), stop_after_s)

        return asyncio.run(main())


def test_an_epoch_trains_every_prompt_once_and_then_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run() == 15
    keys = [key for _, keys in bench.trainer.trained for key in keys]
    assert sorted(keys) == sorted(TASKS)
    assert bench.ledger.audit() == []


@pytest.mark.parametrize("wrong", [{"wall_s": 0.0}, {"wall_s": float("nan")}, {"steps": 0}])
def test_a_budget_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"budget.{next(iter(wrong))}"):
        BudgetRecipe(**wrong)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_staleness_stays_within_the_bound(tmp_path: Path, max_staleness: int) -> None:
    bench = Bench(tmp_path, max_staleness=max_staleness)
    bench.run(seed=max_staleness)
    worst = max(row["staleness_max"] for row in bench.rows.of("step"))
    assert worst <= max_staleness


def test_a_dead_trainer_is_revived_and_its_batches_are_replayed_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SimulatedTrainer(dies_at=(2, 6, 6)))
    assert bench.run() == 15
    by_incarnation = [incarnation for incarnation, _ in bench.trainer.trained]
    assert by_incarnation == sorted(by_incarnation)
    assert max(by_incarnation) == 4
    assert bench.ledger.audit() == []
    survived: dict[str, int] = {}
    for batch in bench.ledger.batches():
        for key in batch.keys:
            survived[key] = survived.get(key, 0) + 1
    assert survived == dict.fromkeys(TASKS, 1)


def test_a_trainer_that_dies_when_all_prompts_are_drawn_still_trains_them_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SimulatedTrainer(dies_at=(14, 15)))
    assert bench.run() == 15
    assert bench.ledger.audit() == []
    assert bench.ledger.counts()["batched"] == 60


def test_a_run_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    with pytest.raises(TimeoutError):
        first.run(stop_after_s=0.15)
    done = len(first.ledger.batches())
    first.ledger.close()
    second = Bench(tmp_path, SimulatedTrainer(step=done))
    assert second.run() == 15
    assert second.ledger.audit() == []
    assert second.ledger.counts()["batched"] == 60


def test_a_group_with_too_few_survivors_is_abandoned_with_its_reason(tmp_path: Path) -> None:
    broken = set(list(TASKS)[:4])
    bench = Bench(tmp_path)
    assert bench.run(members=lambda key: 1 if key in broken else 2) == 14
    assert bench.ledger.counts()["abandoned"] == 4


def test_a_group_that_grows_too_old_can_be_dropped_instead_of_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, late="drop")
    assert bench.run(stuck=STUCK) == 14
    assert bench.ledger.counts()["abandoned"] == 1
    assert max(row["staleness_max"] for row in bench.rows.of("step")) <= 1


def test_the_clock_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    steps = bench.run(wall_s=1.5, stuck=STUCK)
    assert 0 < steps < 15


def test_the_watchdog_names_whom_everything_waits_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(wall_s=1.0, stuck=STUCK)
    assert any(STUCK[:8] in row["waiting_for"] for row in bench.rows.of("watchdog"))


def test_an_error_of_the_runner_ends_the_run_with_that_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def broken(key: str) -> int:
        raise ValueError("a bug in the runner")

    with pytest.raises(ValueError, match="a bug in the runner"):
        bench.run(members=broken)


def test_every_version_that_both_serve_is_probed_for_agreement(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    rows = bench.rows.of("agreement")
    assert rows
    assert all(row["mismatch_max"] == pytest.approx(0.25) for row in rows)
    assert len({row["step"] for row in rows}) == len(rows)
    assert rows[-1]["step"] == bench.trainer.step  # the last version always is


@pytest.mark.parametrize(("min_advantage", "samples"), [(0.0, 8), (0.4, 8), (0.5, 0)])
def test_samples_of_next_to_no_advantage_are_left_out(tmp_path: Path, min_advantage: float, samples: int) -> None:
    bench = Bench(tmp_path, min_advantage=min_advantage)
    assert bench.run(steps=2) == 2
    assert len(read_file(bench.folder.batch(1), Batch).samples) == samples  # two of each group, at + and - 0.5
    assert bench.ledger.audit() == []


def test_the_rate_falls_over_the_last_share_of_the_budget_and_stands_in_the_batch(tmp_path: Path) -> None:
    budget = BudgetRecipe(steps=10, decay_share=0.5)
    rates = [budget.rate(wall_s=0.0, step=step, epoch_steps=99) for step in range(1, 11)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert budget.rate(wall_s=0.75 * budget.wall_s, step=1, epoch_steps=99) == pytest.approx(0.5)
    assert budget.rate(wall_s=2 * budget.wall_s, step=1, epoch_steps=99) == 0.0
    assert budget.rate(wall_s=0.0, step=4, epoch_steps=5) == pytest.approx(0.8), "the epoch ends first"
    assert BudgetRecipe().rate(wall_s=1e9, step=7, epoch_steps=7) == 1.0
    both = BudgetRecipe(wall_s=100.0, warmup_share=0.2, decay_share=0.5)
    rates = [both.rate(wall_s=wall_s, step=1, epoch_steps=9) for wall_s in (0, 5, 20, 50, 75)]
    assert rates == [0.0, 0.25, 1.0, 1.0, 0.5]
    bench = Bench(tmp_path)
    bench.run(steps=4, decay_share=1.0)
    batches = [read_file(bench.folder.batch(step), Batch) for step in range(1, 5)]
    assert [batch.rate for batch in batches] == pytest.approx([1.0, 0.75, 0.5, 0.25], abs=0.01)


def test_it_stops_at_a_step_that_is_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run(steps=6, until=2) == 2
    assert bench.run(steps=6, until=9) == 6


@pytest.mark.parametrize("dials", [{"decay_share": -0.1}, {"warmup_share": 1.1}])
def test_a_share_of_the_budget_is_a_share(dials: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="is no share"):
        BudgetRecipe(**dials)
