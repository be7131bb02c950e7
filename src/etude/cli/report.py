"""`etude report RUN`: one HTML file."""

from __future__ import annotations

from etude.cli.options import RUNS, RunName, Runs, find_run


def report(run: RunName, runs: Runs = RUNS) -> None:
    """Write RUN/report.html: curves, the before/after table, and episodes one can read. Prints its path.

    RUN/learning.svg is the picture of it for a README.
    """
    from etude.report.html import build_report

    print(build_report(find_run(run, runs)))
