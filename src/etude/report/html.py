"""The report of a run: one HTML file that carries everything and loads nothing.

    run.json  metrics.jsonl  result.json  episodes/  recipe.toml  -->  report.html

A run that is unfinished gets a report that says what is missing. What agents wrote is hostile: the template escapes all
text, and a content policy lets only our own scripts run, by digest, so that even a slip could run nothing.

What it does not do: change the run, or serve it live.
"""

from __future__ import annotations

import base64
import hashlib
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from etude.errors import RunError
from etude.frames import write_bytes
from etude.metrics import read_rows
from etude.report.attempts import choose, clean, view
from etude.report.charts import charts
from etude.report.picture import learning_svg
from etude.report.result import Result, differences, headline, read_result, table
from etude.report.series import last_row, step_rows
from etude.report.times import time_bars

_ASSETS = files("etude.report") / "assets"


def build_report(run: Path) -> Path:
    """Write `run`/report.html, and learning.svg beside it, from what is in the folder; returns the page's path.

    Errors: RunError if this is no run, or its result is not what a run writes; StoreError for damaged rows or episodes.
    """
    info = _read_info(run)
    result = read_result(run / "result.json")
    rows = read_rows(run / "metrics.jsonl")
    page = _render(run, info, result, rows)
    path = run / "report.html"
    write_bytes(path, page.encode())
    write_bytes(run / "learning.svg", learning_svg(rows, result).encode())
    return path


def _read_info(run: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((run / "run.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise RunError(f"{run} is not a run", cause=str(error), hint="`etude runs list` shows them") from error


def _render(run: Path, info: dict[str, Any], result: Result | None, rows: list[dict[str, Any]]) -> str:
    steps = step_rows(rows)
    figures = charts(steps)
    tasks = [view(seen) for seen in choose(run / "episodes")]
    changes = [task.change for task in tasks]
    # loaded only where it is drawn with: it is five megabytes
    plotly = _plotly() if figures else Markup("")
    script = _asset("page.js")
    recipe = run / "recipe.toml"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((_ASSETS / "page.html").read_text("utf-8")).render(
        policy=_policy([plotly, script]),
        css=_asset("page.css"),
        js=script,
        plotly=plotly,
        figures=_json(figures),
        name=clean(str(info.get("name") or run.resolve().name)),
        headline=headline(result),
        facts=_facts(result, steps),
        finished=result is not None and result.after is not None,
        missing=_missing(result, steps),
        table=table(result) if result else [],
        differences=differences(result) if result else [],
        k=result.before.k if result else 8,
        charts=figures,
        bars=time_bars(steps, last_row(rows, "time")),
        tasks=tasks,
        changes=[(change, changes.count(change)) for change in dict.fromkeys(changes)],
        about=_flat(info),
        recipe=clean(recipe.read_text("utf-8", "replace")) if recipe.is_file() else "",
    )


def _asset(name: str) -> Markup:
    """One of our own files, as it is."""
    return Markup((_ASSETS / name).read_text("utf-8"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def _json(value: object) -> Markup:
    """JSON inside a script element, which nothing in it can end."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))


def _policy(scripts: list[Markup]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts if script)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _facts(result: Result | None, steps: list[Any]) -> list[str]:
    facts = []
    if steps:
        facts.append(f"{int(steps[-1]['step'])} optimizer steps")
    if steps and "wall_s" in steps[-1]:
        facts.append(f"{_duration(steps[-1]['wall_s'])} of training")
    if result is not None and result.wall_s is not None:
        facts.append(f"{_duration(result.wall_s)} in all")
    return facts


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _missing(result: Result | None, steps: list[Any]) -> str:
    """What an unfinished run lacks, and how to go on."""
    if not steps:
        return "no training step is recorded. The same command that started the run goes on with it."
    at = int(steps[-1]["step"])
    what = "there is no evaluation after training" if result else "there is no result.json"
    return f"{what}; training got to step {at}. The same command that started the run goes on with it."


def _flat(info: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """run.json as (key.path, text)."""
    pairs: list[tuple[str, str]] = []
    for key, value in info.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{path}{key}.")
        elif key == "created" and isinstance(value, float | int):
            pairs.append((key, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(value))))
        elif value is not None:
            pairs.append((clean(f"{path}{key}"), clean(str(value))))
    return pairs
