"""Does the quickstart's agent learn, for the right reason, and what does the way it is trained matter?

    python studies/learning.py                          # all arms without a result: hours; Ctrl-C, and go on later
    python studies/learning.py --arms shuffled lr-0     # some of them
    python studies/learning.py --table                  # only the table of what is there; --plot FILE.svg draws it
    python studies/learning.py --smoke                  # every arm for seconds: that the study runs, not what it says

    long            30 minutes, asynchronous                            async        10 minutes of the same
    synchronous     10 minutes, max_staleness = 0                       rejection    10 minutes, rejection-sampling SFT
    shuffled        10 minutes, rewards dealt out at random: must not improve
    lr-0            10 minutes, learning rate 0: must not improve

An arm is the quickstart's recipe with a few dials turned; a run of it is `etude rl`, a folder under --runs, and is
taken up again where it was. The table has, for every arm, means over its seeds of the same held-out tasks at the same
budget of sampled tokens, the gain with a 95% interval (per task, averaged over seeds, then over tasks), and the gain
over the starting policy barred from finishing until a test passes, at the same budget: skill without persistence.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from etude.bench.compare import distinct_correct
from etude.bench.statistics import Interval, paired_difference, pass_at_k
from etude.bench.suite import SuiteResult
from etude.frames import read_file

SMOKE = ("budget.wall_s=12", "eval.tasks=8", "eval.k=2", "rl.groups_per_step=2", "rl.group_size=4")


@dataclass(frozen=True, slots=True)
class Arm:
    """The quickstart's recipe with these dials."""

    seeds: int
    wall_s: int
    dials: tuple[str, ...] = ()
    must_gain: bool = True


ARMS = {
    "long": Arm(3, 1800),
    "async": Arm(3, 600),
    "synchronous": Arm(3, 600, ("rl.max_staleness=0",)),
    "rejection": Arm(3, 600, ("rl.credit=rejection",)),
    "shuffled": Arm(3, 600, ("rl.credit=shuffled",), must_gain=False),
    "lr-0": Arm(1, 600, ("train.lr=0",), must_gain=False),
}


def run_arm(name: str, seed: int, runs: Path, *, smoke: bool) -> None:
    """Begin or go on with one run. Errors: SystemExit with the command, if it failed."""
    arm = ARMS[name]
    folder = runs / f"{name}-{seed}"
    if (folder / "result.json").exists():
        return
    dials = (f"rl.seed={seed}", f"eval.seed={seed}", f"budget.wall_s={arm.wall_s}", *arm.dials)
    command = [sys.executable, "-m", "etude.cli.main", "rl", "quickstart.toml", *dials, *(SMOKE if smoke else ()),
               "--run", folder.name, "--runs", str(runs)]  # fmt: skip
    print(f"{folder.name}: {' '.join(dials)}", flush=True)
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{folder.name} did not end well; the same command goes on. It ran: {' '.join(command)}")


def summary(name: str, runs: Path) -> dict[str, Any] | None:
    """What the finished runs of an arm gave; None if there is none."""
    folders = [
        folder
        for seed in range(ARMS[name].seeds)
        if (folder := runs / f"{name}-{seed}").joinpath("result.json").exists()
    ]
    if not folders:
        return None
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    suites = {label: [read_file(folder / "evals" / f"{label}.mp", SuiteResult) for folder in folders]
              for label in ("before", "control", "after")}  # fmt: skip
    return {
        "arm": name,
        "seeds": len(folders),
        "train_s": ARMS[name].wall_s,
        "steps": [result["steps"] for result in results],
        "wall_s": fmean(result["wall_s"] for result in results),
        **{f"{label}_pass1": fmean(result[label]["pass1"] for result in results) for label in suites},
        **{f"{label}_passk": fmean(result[label]["passk"] for result in results) for label in suites},
        **{f"{label}_tokens": fmean(result[label]["tokens"] for result in results) for label in suites},
        **{f"{label}_distinct": fmean(map(_distinct, suites[label])) for label in suites},
        "k": results[0]["after"]["k"],
        "gains": [result["gain"] for result in results],
        "gain": _interval(suites["before"], suites["after"], 1),
        "gain_passk": _interval(suites["before"], suites["after"], suites["after"][0].k),
        "gain_over_control": _interval(suites["control"], suites["after"], 1),
    }


def _distinct(suite: SuiteResult) -> float:
    return fmean(distinct_correct(task) for task in suite.tasks)


def _interval(before: Sequence[SuiteResult], after: Sequence[SuiteResult], k: int) -> list[float]:
    """[gain, low, high]: differences per task, averaged over seeds, then over the tasks."""
    differences: dict[str, list[float]] = {}
    for first, last in zip(before, after, strict=True):
        earlier = {task.task_id: task for task in first.tasks if len(task.attempts) >= k}
        for task in last.tasks:
            if task.task_id in earlier and len(task.attempts) >= k:
                was = earlier[task.task_id]
                gained = pass_at_k(len(task.attempts), task.num_solved, k) - pass_at_k(
                    len(was.attempts), was.num_solved, k
                )
                differences.setdefault(task.task_id, []).append(gained)
    means = [fmean(values) for values in differences.values()]
    found: Interval = paired_difference([0.0] * len(means), means)
    return [found.value, found.low, found.high]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| arm | seeds | steps | pass@1 before | after | gain, points (95%) | each seed | over the barred start "
        "| pass@k before | after | patches before | after | tokens after |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gain, over = (
            f"{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
            for value, low, high in (row["gain"], row["gain_over_control"])
        )
        lines.append(
            f"| {row['arm']}, {row['train_s'] // 60} min | {row['seeds']} | {min(row['steps'])} to {max(row['steps'])} "
            f"| {row['before_pass1']:.1%} | {row['after_pass1']:.1%} | {gain} "
            f"| {', '.join(f'{100 * value:+.1f}' for value in row['gains'])} | {over} "
            f"| {row['before_passk']:.1%} | {row['after_passk']:.1%} "
            f"| {row['before_distinct']:.2f} | {row['after_distinct']:.2f} | {row['after_tokens']:.0f} |"
        )
    return "\n".join(lines) + "\n"


_ROW, _LEFT, _WIDTH, _TOP = 44, 190, 860, 54
_STYLE = (
    ".t{font:14px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1c1f24}"
    ".s{font-size:12.5px;fill:#5c636d}.grid{stroke:#e3e0d8}.ci{stroke:#2f6f6d;stroke-width:3}"
    ".control{stroke:#b4552d;stroke-width:3}.seed{fill:none;stroke:#5c636d}"
)


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """SVG: a line an arm, its gain in points with the 95% interval, and a ring for each seed. Controls in red."""
    spans = [100 * value for row in rows for value in (*row["gain"], *row["gains"])]
    low, high = min(0.0, *spans) - 1, max(0.0, *spans) + 1

    def x(points: float) -> float:
        return round(_LEFT + (points - low) / (high - low) * (_WIDTH - _LEFT - 90), 1)

    bottom = _TOP + _ROW * len(rows)
    parts = ['<text class="t" x="14" y="28">Gain in pass@1 on held-out tasks, points, by arm</text>']
    for tick in range(5 * int(low // 5 + 1), int(high) + 1, 5):
        parts.append(f'<line class="grid" x1="{x(tick)}" y1="{_TOP - 12}" x2="{x(tick)}" y2="{bottom - 12}"/>')
        parts.append(f'<text class="t s" x="{x(tick)}" y="{bottom + 6}" text-anchor="middle">{tick:+d}</text>')
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number + 10
        value, start, end = (100 * part for part in row["gain"])
        kind = "ci" if ARMS[row["arm"]].must_gain else "control"
        parts += [
            f'<text class="t" x="14" y="{y}">{row["arm"]}</text>',
            f'<text class="t s" x="14" y="{y + 16}">{row["train_s"] // 60} min, {row["seeds"]} seeds</text>',
            f'<line class="{kind}" x1="{x(start)}" y1="{y}" x2="{x(end)}" y2="{y}"/>',
            *(f'<circle class="seed" cx="{x(100 * seed)}" cy="{y}" r="5"/>' for seed in row["gains"]),
            f'<text class="t" x="{_WIDTH - 70}" y="{y + 5}">{value:+.1f}</text>',
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 20}" role="img" '
        f'aria-label="Gain in pass@1 by arm"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must hold and does not: controls that improve, arms that do not."""
    wrong = []
    for row in rows:
        value, low, _ = row["gain"]
        if not ARMS[row["arm"]].must_gain and low > 0:
            wrong.append(f"the control {row['arm']} improves by {value:+.3f}: the measurement is not to be trusted")
        if ARMS[row["arm"]].must_gain and low <= 0:
            wrong.append(f"{row['arm']} gains {value:+.3f}, which may be nothing")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the arms' runs")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--json", type=Path, help="also write the table's numbers here")
    parser.add_argument("--plot", type=Path, help="also draw the gains, as SVG, here")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true", help="every arm for seconds, one seed")
    chosen = parser.parse_args()
    if not chosen.table:
        for seed in range(1 if chosen.smoke else max(arm.seeds for arm in ARMS.values())):
            for name in chosen.arms:
                if seed < ARMS[name].seeds:
                    run_arm(name, seed, chosen.runs, smoke=chosen.smoke)
    rows = [row for name in chosen.arms if (row := summary(name, chosen.runs)) is not None]
    print(table(rows))
    print("\n".join(verdicts(rows)), file=sys.stderr)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))
    if chosen.plot and rows:
        chosen.plot.write_text(plot(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
