"""`etude sessions`: import logs, watch what becomes of the code, review, list and forget."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from etude.cli.options import Json, show, stderr, visible
from etude.errors import SessionError

if TYPE_CHECKING:
    from etude.sessions.found import SessionRow
    from etude.sessions.store import SessionStore

app = typer.Typer(help="What people and agents did together.", no_args_is_help=True)
Db = Annotated[str, typer.Option("--db", envvar="ETUDE_SESSIONS_DB", help="sqlite:///FILE or postgresql://...")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose sessions: a team's name.")]
User = Annotated[str, typer.Option("--user", help="Whose sessions: a person's name.")]
Days = Annotated[int | None, typer.Option("--retention-days", min=1, help="Delete them after so many days.")]
AllTenants = Annotated[str | None, typer.Option("--tenant", help="Of this team alone.")]
AllUsers = Annotated[str | None, typer.Option("--user", help="Of this person alone.")]
_STYLES = {"head": "bold", "user": "green", "tool": "dim", "call": "cyan", "reply": "", "redacted": "yellow"}


@contextlib.contextmanager
def _store(db: str) -> Iterator[SessionStore]:
    from etude.sessions.opening import open_store
    from etude.sessions.recipe import SessionsRecipe

    with contextlib.closing(open_store(SessionsRecipe(db=db))) as store:
        yield store


@app.command("import")
def import_(
    paths: Annotated[list[Path], typer.Argument(help="Logs, or folders of them: ~/.claude/projects, ~/.codex, ...")],
    consent: Annotated[str, typer.Option("--consent", help="What may be done with them: keep, or train.")] = "",
    format: Annotated[str, typer.Option("--format", help="auto, claude-code, codex, opencode, ...")] = "auto",
    user: User = "me",
    tenant: Tenant = "local",
    retention_days: Days = None,
    db: Db = "",
    as_json: Json = False,
) -> None:
    """Read the logs of coding agents into the session database, redacted. Importing twice stores once."""
    from etude.metrics import progress
    from etude.protocols import Consent, Owner
    from etude.sessions.importing import import_logs
    from etude.sessions.readers import logs
    from etude.sessions.review import found_text

    if consent not in ("keep", "train"):
        cause = f"--consent {consent}" if consent else "nobody said what may be done with them"
        raise SessionError("sessions need consent", cause=cause, hint="--consent keep, or --consent train")
    owner = Owner(tenant=tenant, user=user, consent=Consent(consent), retention_days=retention_days)
    with _store(db) as store, progress("import", total=len(logs(paths)), quiet=as_json) as bar:
        done = import_logs(store, paths, owner, format=format, advance=bar.advance)
    row = {"files": done.files, "sessions": len(done.sessions), "turns": done.added.turns, "known": done.added.known,
           "refused": done.added.refused, "skipped": dict(done.skipped), "redacted": dict(done.redacted),
           "damaged": done.refused}  # fmt: skip
    if as_json:
        print(json.dumps(row))
    else:
        print(
            f"{done.files} logs, {len(done.sessions)} sessions: {done.added.turns} new turns, {done.added.known} known"
        )
        for name, found in (("skipped", done.skipped), ("taken out", done.redacted)):
            if found:
                print(f"  {name}: {found_text(found)}")
        for line in done.refused:
            stderr().print(line, markup=False)
    if done.refused and not done.files:
        raise typer.Exit(1)


@app.command("list")
def list_(tenant: AllTenants = None, user: AllUsers = None, db: Db = "", as_json: Json = False) -> None:
    """Every session, newest first."""
    with _store(db) as store:
        rows = [
            {"session": row.session_id, "user": f"{row.tenant}/{row.user}", "source": row.source, "model": row.model,
             "repository": row.repository, "turns": row.num_turns, "events": row.num_events, "consent": row.consent,
             "last": time.strftime("%Y-%m-%d %H:%M", time.localtime(row.last_at))}
            for row in store.sessions(tenant=tenant, user=user)
        ]  # fmt: skip
    if not as_json:  # what fits a terminal
        names = ("session", "user", "source", "turns", "last")
        rows = [{name: str(row[name])[:24] for name in names} for row in rows]
    show(rows, as_json=as_json)


@app.command("watch")
def watch(
    repo: Annotated[Path, typer.Option("--repo", help="A git repository.")] = Path("."),
    branch: Annotated[str, typer.Option(help="The branch; else the one that is checked out.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 60.0,
    db: Db = "",
    as_json: Json = False,
) -> None:
    """Join a repository's commits to the turns that wrote them, and measure how much stays. Ctrl-C ends it."""
    from etude.code.history import Repository
    from etude.sessions.retention import Watch

    with _store(db) as store:
        watched = Watch(store, Repository(repo), branch=branch or None)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                expired, found = store.expire(), watched.look()
                row = {"branch": watched.name, "commits": found.commits, "landed": found.landed,
                       "measured": found.measured, "expired": expired}  # fmt: skip
                if as_json:
                    print(json.dumps(row), flush=True)
                elif once or any((found.commits, found.landed, found.measured, expired)):
                    print(f"{watched.name}: {found.commits} new commits, {found.landed} turns landed, "
                          f"{found.measured} shares measured, {expired} turns expired", flush=True)  # fmt: skip
                if once:
                    break
                time.sleep(interval_s)


@app.command("review")
def review(tenant: AllTenants = None, user: AllUsers = None, db: Db = "", as_json: Json = False) -> None:
    """Look at sessions one by one, with what was taken out of them, and drop turns or sessions."""
    from etude.sessions.review import turn_row

    with _store(db) as store:
        rows = store.sessions(tenant=tenant, user=user)
        if as_json:
            print(json.dumps([turn_row(one) for row in rows for one in store.turns(row.tenant, row.session_id)]))
            return
        for place, row in enumerate(rows, 1):
            if not _review_session(store, row, f"session {place} of {len(rows)}"):
                break


def _review_session(store: SessionStore, row: SessionRow, name: str) -> bool:
    """False: the person has had enough."""
    from etude.sessions.review import turn_lines

    console = Console(highlight=False)
    turns = list(store.turns(row.tenant, row.session_id))
    console.rule(f"{name}: {row.session_id} ({row.tenant}/{row.user}, {row.source}, {row.consent})", style="dim")
    for stored in turns:
        for kind, text in turn_lines(stored):
            shown = f"{kind}: {text}" if kind in ("redacted", "call") else text
            console.print(visible(shown), style=_STYLES[kind], markup=False)
    while True:
        console.print("\\[enter] next  \\[d] drop the session  \\[t NUMBER] drop a turn  \\[q] end: ", end="")
        sys.stdout.flush()
        line = sys.stdin.readline()
        answer = line.strip().lower()
        if not line or answer == "q":
            return False
        if answer == "":
            return True
        if answer == "d":
            store.drop_session(row.tenant, row.session_id)
            console.print("dropped")
            return True
        wanted = answer.removeprefix("t").strip()
        hit = next((one.turn.turn_id for one in turns if answer[0] == "t" and str(one.turn.number) == wanted), None)
        if hit is None:
            console.print("there is no such answer or turn", style="red")
            continue
        store.drop_turn(hit)
        turns = [one for one in turns if one.turn.turn_id != hit]
        console.print("dropped")
        if not turns:
            return True


@app.command("forget")
def forget(
    user: Annotated[str, typer.Argument(help="The person.")],
    tenant: Tenant = "local",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    db: Db = "",
    as_json: Json = False,
) -> None:
    """Delete everything of a person, and say which versions were trained on any of it."""
    with _store(db) as store:
        count = sum(row.num_turns for row in store.sessions(tenant=tenant, user=user))
        if not yes:
            stderr().print(f"delete {count} turns of {tenant}/{user} for good? type the name to go on: ", end="")
            if sys.stdin.readline().strip() != user:
                raise SessionError("nothing was deleted", hint="type the person's name, or give --yes")
        versions = store.forget(tenant, user)
    names = [version.name for version in versions]
    if as_json:
        print(json.dumps({"user": user, "tenant": tenant, "turns": count, "trained": names}))
    else:
        print(f"{count} turns deleted; versions that were trained on them: {', '.join(names) or 'none'}")
