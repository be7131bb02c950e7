"""A run's result in a terminal: the before/after table, the differences, and where the report is."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.report.result import differences, headline, read_result, table


def result_text(run: Path) -> str:
    """What `etude quickstart` prints at its end. Errors: RunError if the result is damaged."""
    result = read_result(run / "result.json")
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, highlight=False)
    if result is not None:
        grid = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("policy", "pass@1", f"pass@{result.before.k}", "tasks x tries", "distinct fixes", "tokens"):
            grid.add_column(name, justify="left" if name == "policy" else "right")
        for row in table(result):
            grid.add_row(row.name, row.pass1, row.passk, row.n, row.distinct, row.tokens)
        console.print(grid)
        for name, gain, ci95 in differences(result):
            console.print(f"{name}: {gain} points (95% interval {ci95})", markup=False)
    console.print(headline(result), markup=False)
    console.print(f"report: {run / 'report.html'}", markup=False, soft_wrap=True)
    return buffer.getvalue().rstrip()
