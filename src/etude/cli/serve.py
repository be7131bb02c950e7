"""`etude serve`: OpenAI, Anthropic and agent endpoints over a model."""

from __future__ import annotations

import getpass
import json
from typing import Annotated, Any

import typer

from etude.cli.options import Json, stderr

Model = Annotated[str, typer.Option("--model", help="A folder, a hub id, or etude-nano.")]
Weights = Annotated[str, typer.Option("--weights", help="Weight store to follow (file://, s3://).")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; others than this machine's need --keys.")]
Port = Annotated[int, typer.Option("--port", help="0: one that is free.")]
KeyFile = Annotated[str, typer.Option("--keys", help="File of keys (docs/serve.md).")]
Agent = Annotated[bool, typer.Option("--agent", help="Serve the agent too: it runs tools in sandboxes.")]
Consents = Annotated[
    str, typer.Option("--consent", help="What you allow, without keys: none, keep or train (docs/sessions.md).")
]
Db = Annotated[str, typer.Option("--db", envvar="ETUDE_SESSIONS_DB", help="Database of sessions; else your own.")]
NewKey = Annotated[str, typer.Option("--new-key", metavar="NAME", help="Print a new key and its table, and end.")]
Dials = Annotated[list[str] | None, typer.Option("-o", help="A dial, e.g. -o serve.strict=true.")]


def serve(
    model: Model = "etude-nano",
    weights: Weights = "",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    keys: KeyFile = "",
    agent: Agent = False,
    consent: Consents = "none",
    db: Db = "",
    new_key: NewKey = "",
    override: Dials = None,
    as_json: Json = False,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients, to coding agents and editors. SIGTERM lets answers finish."""
    if new_key:
        from etude.serve.keys import new_key as make_key

        key, table = make_key(new_key, tenant="local", user=getpass.getuser())
        print(json.dumps({"key": key, "table": table}) if as_json else f"{key}\n\n{table}", end="\n" if as_json else "")
        return
    from etude.serve.server import run as run_server
    from etude.serving import open_server, serve_stage

    settings: dict[str, Any] = {"host": host, "port": port, "keys": keys, "agent": agent, "consent": consent}
    stage = serve_stage(model, weights, settings, db, override or [])

    async def run() -> None:
        async with open_server(stage) as server:
            print(json.dumps({"url": server.url, "model": stage.model.path}) if as_json else server.url, flush=True)
            stderr().print("OpenAI: /v1/chat/completions, /v1/responses; Anthropic: /v1/messages; Ctrl-C ends")
            await server.until_told_to_end()

    run_server(run())
