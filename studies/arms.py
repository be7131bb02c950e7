"""What studies share: runs of the quickstart's recipe with a few dials turned, kept as small records, tabled, drawn.

An arm is a set of dials; a run of it is `etude rl`, a folder under --runs, taken up again where it was. What a finished
run says is one line of results/STUDY.jsonl: solved attempts of every held-out task, task by task, and the curves of its
steps. Table and plot come from those lines alone, so they can be made where no run ever was.

Intervals are paired: per task, averaged over seeds, then normal over tasks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from etude.bench.compare import distinct_correct
from etude.bench.statistics import paired_difference, pass_at_k
from etude.bench.suite import SuiteResult
from etude.frames import read_file
from etude.metrics import read_rows

SMOKE = ("budget.wall_s=12", "eval.tasks=8", "eval.k=2", "rl.groups_per_step=2", "rl.group_size=4")
LABELS = ("before", "control", "after")
CURVES = ("reward_mean", "solve_rate", "sampled_tokens_mean", "entropy", "off_policy_ratio_p99", "kl_k1")
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arm:
    """The quickstart's recipe with these dials. A run ends by its clock, its steps, or the end of its epoch."""

    seeds: int
    dials: tuple[str, ...] = ()
    must_gain: bool | None = True
    """None: whatever comes out; False: a control, which must not."""


def run_arm(name: str, arm: Arm, seed: int, runs: Path, *, smoke: bool) -> Path:
    """Begin or go on with one run; its folder. Errors: SystemExit with the command, if it failed."""
    folder = runs / f"{name}-{seed}"
    if (folder / "result.json").exists():
        return folder
    dials = (f"rl.seed={seed}", f"eval.seed={seed}", *arm.dials)
    command = [sys.executable, "-m", "etude.cli.main", "rl", "quickstart.toml", *dials, *(SMOKE if smoke else ()),
               "--run", folder.name, "--runs", str(runs)]  # fmt: skip
    print(f"{folder.name}: {' '.join(dials)}", flush=True)
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{folder.name} did not end well; the same command goes on. It ran: {' '.join(command)}")
    return folder


def record_of(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """What a finished run says, small enough to be kept for good."""
    result = json.loads((folder / "result.json").read_text())
    steps = [entry["row"] for entry in read_rows(folder / "metrics.jsonl") if entry["kind"] == "step"]
    suites = {label: read_file(folder / "evals" / f"{label}.mp", SuiteResult) for label in LABELS}
    return {
        "arm": name,
        "seed": seed,
        "steps": result["steps"],
        "wall_s": round(result["wall_s"]),
        "train_s": round(steps[-1]["wall_s"]) if steps else 0,
        "suites": {
            label: {
                "k": suite.k,
                "solved": [task.num_solved if len(task.attempts) >= suite.k else None for task in suite.tasks],
                "tokens": round(result[label]["tokens"], 1),
                "distinct": round(fmean(map(distinct_correct, suite.tasks)), 4),
            }
            for label, suite in suites.items()
        },
        "curves": {curve: [round(row[curve], 4) for row in steps if curve in row] for curve in CURVES},
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """All lines of a study's results; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(name: str, arm: Arm, records: Sequence[Record]) -> dict[str, Any] | None:
    """One row of the table; None if no run of the arm is there."""
    own = [record for record in records if record["arm"] == name]
    if not own:
        return None
    k = own[0]["suites"]["after"]["k"]
    return {
        "arm": name,
        "seeds": len(own),
        "must_gain": arm.must_gain,
        "steps": [record["steps"] for record in own],
        "train_s": fmean(record["train_s"] for record in own),
        **{f"{label}_pass1": fmean(_rate(record, label, 1) for record in own) for label in LABELS},
        **{f"{label}_passk": fmean(_rate(record, label, k) for record in own) for label in ("before", "after")},
        **{f"{label}_tokens": fmean(record["suites"][label]["tokens"] for record in own) for label in LABELS},
        **{f"{label}_distinct": fmean(record["suites"][label]["distinct"] for record in own) for label in LABELS},
        "k": k,
        "gains": [_interval([record], "before", 1)[0] for record in own],
        "gain": _interval(own, "before", 1),
        "gain_passk": _interval(own, "before", k),
        "gain_over_control": _interval(own, "control", 1),
    }


def _per_task(record: Record, label: str, k: int) -> list[float | None]:
    suite = record["suites"][label]
    return [None if solved is None else pass_at_k(suite["k"], solved, k) for solved in suite["solved"]]


def _rate(record: Record, label: str, k: int) -> float:
    return fmean(value for value in _per_task(record, label, k) if value is not None)


def _interval(records: Sequence[Record], baseline: str, k: int) -> list[float]:
    """[gain, low, high] of `after` over `baseline`: differences per task, averaged over seeds, then over the tasks."""
    differences: dict[int, list[float]] = {}
    for record in records:
        pairs = zip(_per_task(record, baseline, k), _per_task(record, "after", k), strict=True)
        for number, (first, last) in enumerate(pairs):
            if first is not None and last is not None:
                differences.setdefault(number, []).append(last - first)
    means = [fmean(values) for values in differences.values()]
    found = paired_difference([0.0] * len(means), means)
    return [found.value, found.low, found.high]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| arm | seeds | steps, seconds | pass@1 before | after | gain, points (95%) | each seed | over barred start "
        "| pass@k before | after | patches before | after | tokens after |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gain, over = (
            f"{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
            for value, low, high in (row["gain"], row["gain_over_control"])
        )
        steps = sorted({min(row["steps"]), max(row["steps"])})
        lines.append(
            f"| {row['arm']} | {row['seeds']} | {' to '.join(map(str, steps))}, {row['train_s']:.0f} "
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


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
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
        kind = "control" if row["must_gain"] is False else "ci"
        seeds = f"{row['seeds']} seed{'s' if row['seeds'] > 1 else ''}"
        parts += [
            f'<text class="t" x="14" y="{y}">{row["arm"]}</text>',
            f'<text class="t s" x="14" y="{y + 16}">{row["train_s"]:.0f} s, {seeds}</text>',
            f'<line class="{kind}" x1="{x(start)}" y1="{y}" x2="{x(end)}" y2="{y}"/>',
            *(f'<circle class="seed" cx="{x(100 * seed)}" cy="{y}" r="5"/>' for seed in row["gains"]),
            f'<text class="t" x="{_WIDTH - 70}" y="{y + 5}">{value:+.1f}</text>',
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 20}" role="img" '
        f'aria-label="Gain in pass@1 by arm"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must hold and does not: controls that improve, arms that do not."""
    wrong = []
    for row in rows:
        value, low, _ = row["gain"]
        if row["must_gain"] is False and low > 0:
            wrong.append(f"the control {row['arm']} improves by {value:+.3f}: the measurement is not to be trusted")
        if row["must_gain"] and low <= 0:
            wrong.append(f"{row['arm']} gains {value:+.3f}, which may be nothing")
    return wrong


def main(study: str, arms: Mapping[str, Arm], about: str | None) -> list[dict[str, Any]]:
    """The command line of a study; returns the table's rows."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs") / study, help="folder of the arms' runs")
    results = Path(__file__).parent / "results" / f"{study}.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="what finished runs said, a line each")
    parser.add_argument("--arms", nargs="+", choices=list(arms), default=list(arms))
    parser.add_argument("--seeds", nargs="+", type=int, help="only these")
    parser.add_argument("--json", type=Path, help="also write the table's numbers here")
    parser.add_argument("--plot", type=Path, help="also draw the gains, as SVG, here")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true", help="every arm for seconds, one seed")
    chosen = parser.parse_args()
    if not chosen.table:
        for seed in [0] if chosen.smoke else chosen.seeds or range(max(arm.seeds for arm in arms.values())):
            for name in chosen.arms:
                done = {(record["arm"], record["seed"]) for record in read_records(chosen.results)}
                if seed < arms[name].seeds and (name, seed) not in done:
                    folder = run_arm(name, arms[name], seed, chosen.runs, smoke=chosen.smoke)
                    chosen.results.parent.mkdir(parents=True, exist_ok=True)
                    with chosen.results.open("a") as file:
                        file.write(json.dumps(record_of(name, seed, folder)) + "\n")
    records = read_records(chosen.results)
    rows = [row for name in chosen.arms if (row := summary(name, arms[name], records)) is not None]
    print(table(rows))
    print("\n".join(verdicts(rows)), file=sys.stderr)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))
    if chosen.plot and rows:
        chosen.plot.write_text(plot(rows), encoding="utf-8")
    return rows
