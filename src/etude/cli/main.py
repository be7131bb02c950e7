"""`etude`: the table of commands, and how errors and Ctrl-C end one.

Exit codes: 0 ok, 1 failed, 2 usage (a wrong option, recipe or file), 130 stopped by Ctrl-C.
Commands load what they need when they run: `etude --help` loads no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from etude import __version__
from etude.cli import agent, checks, doctor, nano, report, rl, runs, serve, sessions, tasks, weights
from etude.errors import EtudeError

app = typer.Typer(
    name="etude",
    help="Train, measure and keep improving a coding agent on your code.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("quickstart", rich_help_panel="Start")(rl.quickstart)
app.command("doctor", rich_help_panel="Start")(doctor.doctor)
app.add_typer(tasks.app, name="tasks", rich_help_panel="Data")
app.add_typer(sessions.app, name="sessions", rich_help_panel="Data")
app.command("pretrain", rich_help_panel="Train")(nano.pretrain)
app.command("sft", rich_help_panel="Train")(nano.sft)
app.command("rl", rich_help_panel="Train")(rl.rl)
app.command("report", rich_help_panel="Measure")(report.report)
app.command("check", rich_help_panel="Measure")(checks.check)
app.command("agent", rich_help_panel="Use")(agent.agent)
app.command("serve", rich_help_panel="Use")(serve.serve)
app.add_typer(runs.app, name="runs", rich_help_panel="Manage")
app.add_typer(weights.app, name="weights", rich_help_panel="Manage")


def main() -> None:
    """Entry point. Errors of Etude are printed with cause and hint; anything else is a bug and keeps its traceback."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # Etude sends nothing anywhere
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except EtudeError as error:
        print(f"etude: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout went away (`etude runs list | head`): that is its right.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
