"""`etude doctor`: what this machine lacks, and the fix."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from etude.cli.options import Json


def doctor(as_json: Json = False) -> None:
    """Check this machine. Exit code 1 if something that Etude needs is missing."""
    from etude.build import examine

    findings = examine()
    if as_json:
        print(json.dumps(findings))
    else:
        console = Console()
        for finding in findings:
            mark = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "missing": "[red]!![/]"}[finding["state"]]
            console.print(f"{mark} {finding['name']}: ", end="")
            console.print(finding["text"], markup=False, highlight=False)
            if finding["fix"]:
                console.print(f"   hint: {finding['fix']}", markup=False, highlight=False)
    if any(finding["state"] == "missing" for finding in findings):
        raise typer.Exit(1)
