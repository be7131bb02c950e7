"""Hostile requests against a server with two tenants' keys: what is counted, and what must never happen.

    python tests/serve/hostile.py [--requests 10000] [--seed 0]

garbage      bytes that are no JSON, cut or mangled bodies, values of the wrong kind, deep and huge ones
strangers    one tenant's histories, session ids and turn ids in the mouth of the other
agents       one tenant's agent at work in a real sandbox, while the other tries its id, and clients leave in the middle
sockets      heads that never end, bodies that never come, clients that hang up in the middle
document     cases that schemathesis makes of the OpenAPI document, right and wrong ones

A status of 500, a prompt with words of both tenants, or a context, session or event that crosses over is a finding.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import copy
import json
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

sys.path.append(str(Path(__file__).parents[1]))
from etude.agent.recipe import AgentRecipe
from etude.protocols import Consent, GenerateRequest, Owner
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from etude.serve.keys import Quota
from serve.speaking import MemoryRecorder, QwenChat, Speaker, calls, decoded, keys_of, says, serving

OWNERS = {name: Owner(tenant=name, user="u", consent=Consent.TRAIN) for name in ("ann", "bob")}
AGENTS = "/v1/agent/sessions"
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/feedback", AGENTS,
         f"{AGENTS}/0123456789abcdef/messages", f"{AGENTS}/x/answers")  # fmt: skip
AGENT = AgentRecipe(tools=("read_file", "shell"), max_turns=3, reply_tokens=60)
ODD: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "\u0000", "x" * 3000, "\U0001f600\ufffd", [], {}, [[]],
                  {"type": "x"}, [None], {"a": {"b": []}}, "<|im_end|>", "NaN"]  # fmt: skip


@dataclass
class Findings:
    """What came of it."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    sent: int = 0

    def note(self, status: int, text: str, what: str) -> None:
        self.sent += 1
        self.statuses[str(status)] += 1
        if status >= 500 and (status == 500 or '"code"' not in text):
            self.wrong.append(f"{what}: {status} {text[:300]}")
        if status >= 400 and '"error"' not in text and status != 431:
            self.wrong.append(f"{what}: {status} without a typed error: {text[:200]}")


class Watching(Speaker):
    """An engine that knows whose words are in a prompt: each tenant's carry its mark."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.homes: dict[str, str] = {}
        super().__init__(self._watch)

    def _watch(self, request: GenerateRequest) -> list[int]:
        prompt = decoded(request.ids[:4000])
        marks = [name for name in OWNERS if f"mark-{name}" in prompt]
        if len(marks) > 1 and "stolen" not in prompt:
            self.findings.wrong.append(f"a prompt holds words of {marks}")
        if len(marks) == 1:
            home = self.homes.setdefault(request.context_id, marks[0])
            if home != marks[0]:
                self.findings.wrong.append(f"context {request.context_id} of {home} was used by {marks[0]}")
        return calls("shell", command="ls") if random.random() < 0.3 else says(f"ok {random.randrange(4)}")


@contextlib.contextmanager
def hostile_site(findings: Findings) -> Iterator[tuple[str, MemoryRecorder]]:
    """A server in a thread of its own."""
    ready, end = threading.Event(), asyncio.Event()
    found: list[Any] = []

    def run() -> None:
        async def serve() -> None:
            keys = keys_of(**{name: (owner, Quota()) for name, owner in OWNERS.items()})
            settings = {"body_timeout_s": 10.0, "max_body_bytes": 1 << 20, "send_timeout_s": 2.0, "max_messages": 200,
                        "agent_sessions": 24, "agent_idle_s": 2.0}  # fmt: skip
            async with (
                NamespacePool(SandboxRecipe(spares=2, memory_mb=256, timeout_s=10.0)) as pool,
                serving(Watching(findings), keys=keys, chat=QwenChat(), pool=pool, agent=AGENT, **settings) as site,
            ):
                found.extend((site, asyncio.get_running_loop()))
                ready.set()
                await end.wait()

        asyncio.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(300)
    site, loop = found
    try:
        yield site.url, site.recorder
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def valid(path: str, owner: str, rng: random.Random) -> dict[str, Any]:
    """A body that is as it should be."""
    words = f"mark-{owner} {rng.choice(['list', 'repair', 'say', 'explain'])} {rng.randrange(5)}"
    if path == "/feedback":
        return {"session": "s-0", "kind": "kept", "value": 0.5}
    if path == AGENTS:
        return {"files": {"note.txt": words}, "tools": ["shell"], "max_turns": 2}
    if path.startswith(AGENTS):
        return {"text": words}
    tool = {"name": "shell", "description": "d", "parameters": {"type": "object"}}
    if path == "/v1/responses":
        return {"model": "qwen", "input": [{"role": "user", "content": words}], "tools": [{"type": "function", **tool}]}
    body: dict[str, Any] = {"model": "qwen", "messages": [{"role": "user", "content": words}], "max_tokens": 20}
    if path.startswith("/v1/messages"):
        body["tools"] = [{"name": "shell", "input_schema": {"type": "object"}}]
    else:
        body |= {"tools": [{"type": "function", "function": tool}], "stream": rng.random() < 0.5}
    return body


def mangled(body: dict[str, Any], rng: random.Random) -> bytes:
    """The body with something wrong in it."""
    for _ in range(rng.randrange(1, 4)):
        node: Any = body
        while isinstance(node, dict | list) and node:
            place = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if rng.random() < 0.4 or not isinstance(node[place], dict | list):
                node[place] = copy.deepcopy(rng.choice(ODD))
                break
            node = node[place]
        if rng.random() < 0.2 and isinstance(body, dict):
            names = ["temperature", "stop", "n", "metadata", "seed", "tool_choice", "system"]
            body[rng.choice(names)] = copy.deepcopy(rng.choice(ODD))
    data = json.dumps(body).encode()
    kind = rng.randrange(8)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        place = rng.randrange(len(data))
        return data[:place] + rng.randbytes(rng.randrange(1, 6)) + data[place:]
    if kind == 2:
        return rng.choice([b"", b"null", b"[]", b"\x00", b'"x"', b"[" * 5000, b'{"a":' * 3000, b"1" * 5000])
    if kind == 3:
        return data.replace(b"}", b',"x":"' + b"y" * rng.choice([10, 70_000, 1 << 20]) + b'"}', 1)
    return data


async def garbage(client: httpx2.AsyncClient, findings: Findings, rng: random.Random) -> None:
    owner, path = rng.choice(list(OWNERS)), rng.choice(PATHS)
    headers = {"authorization": f"Bearer {owner}".encode()}
    if rng.random() < 0.2:
        odd = ["", "x", "-1", "9" * 40, "é" * 9, "1.1", "s-0123456789abcdef0123-0123456789ab"]
        name = rng.choice(["min-step", "exact-version", "session", "repository"])
        headers[f"x-etude-{name}"] = rng.choice(odd).encode("latin-1")
    data = mangled(valid(path, owner, rng), rng)
    named = [(name.encode(), value) for name, value in headers.items()]
    try:
        got = await client.request(rng.choice(["POST"] * 9 + ["PUT"]), path, content=data, headers=named)
    except httpx2.TransportError as error:  # one that is too large is answered before it has been read
        findings.sent += 1
        findings.statuses[type(error).__name__] += 1
        if len(data) < 1 << 20:
            findings.wrong.append(f"{path} {data[:200]!r}: {error!r}")
        return
    findings.note(got.status_code, got.text, f"{path} {data[:200]!r}")


async def stranger(client: httpx2.AsyncClient, findings: Findings, rng: random.Random) -> None:
    """A conversation of one tenant, then the other says it again, under the same names."""
    owner, thief = rng.sample(list(OWNERS), 2)
    path = "/v1/chat/completions"
    body = {**valid(path, owner, rng), "stream": False}
    name = rng.choice(["", "shared"])
    own = {"authorization": f"Bearer {owner}", "x-etude-session": name}
    got = await client.post(path, json=body, headers=own)
    findings.note(got.status_code, got.text, "own")
    if got.status_code != 200:
        findings.wrong.append(f"a good request was refused: {got.status_code} {got.text[:300]}")
        return
    session, turn = got.headers["x-etude-session"], got.headers["x-etude-turn"]
    said = got.json()["choices"][0]["message"]
    more = {"role": "user", "content": f"mark-{owner} more"}
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in said.get("tool_calls") or ()]
    history = [*body["messages"], said, *answers, more]
    stolen = {"authorization": f"Bearer {thief}", "x-etude-session": rng.choice([name, session])}
    words = [{"role": "system", "content": f"stolen by mark-{thief}"}] if rng.random() < 0.5 else []
    again = await client.post(path, json={**body, "messages": [*words, *history]}, headers=stolen)
    findings.note(again.status_code, again.text, "stolen")
    if again.status_code != 200:
        findings.wrong.append(f"a good history was refused: {again.status_code} {again.text[:300]}")
        return
    if again.headers["x-etude-session"] == session:
        findings.wrong.append("a session of another key was entered")
    event = {"session": session, "turn": turn, "kind": "rating", "value": 1}
    told = await client.post("/feedback", json=event, headers={"authorization": f"Bearer {thief}"})
    findings.note(told.status_code, told.text, "feedback")
    if told.status_code != 404:
        findings.wrong.append("feedback on a session of another key was taken")


async def agent(client: httpx2.AsyncClient, findings: Findings, rng: random.Random) -> None:
    """A session of one tenant that the other tries to enter, at work or not; some clients leave in the middle."""
    owner, thief = ({"authorization": f"Bearer {name}"} for name in rng.sample(list(OWNERS), 2))
    name = owner["authorization"].split()[1]
    got = await client.post(AGENTS, json={"files": {"note.txt": f"mark-{name}"}}, headers=owner)
    findings.note(got.status_code, got.text, "agent")
    if got.status_code != 200:
        if got.status_code != 529:
            findings.wrong.append(f"a good session was refused: {got.status_code} {got.text[:300]}")
        return
    path = f"{AGENTS}/{got.json()['id']}"
    patience = rng.choice([0.01, 60.0])
    speaking = asyncio.create_task(
        client.post(f"{path}/messages", json={"text": f"mark-{name} list"}, headers=owner, timeout=patience)
    )
    for method, place, body in rng.sample([
        ("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/messages", {"text": "mine now"}),
        ("POST", f"{path}/answers", {"text": "yes"}),
    ], 4):  # fmt: skip
        stolen = await client.request(method, place, json=body, headers=thief)
        findings.note(stolen.status_code, stolen.text, "stolen agent")
        if stolen.status_code != 404:
            findings.wrong.append(f"{method} on an agent of another key: {stolen.status_code} {stolen.text[:300]}")
    try:
        said = await speaking
        findings.note(said.status_code, said.text, "agent's answer")
        if said.status_code == 200 and '"type":"end"' not in said.text:
            findings.wrong.append(f"an agent ended without an end: {said.text[-300:]}")
    except httpx2.TransportError:
        findings.sent += 1
        findings.statuses["left"] += 1
    ended = await client.delete(path, headers=owner)
    findings.note(ended.status_code, ended.text, "agent's end")
    if ended.status_code not in (200, 404, 409):  # gone after a while without use, or still at work
        findings.wrong.append(f"an agent could not be ended: {ended.status_code} {ended.text[:300]}")


async def socket_abuse(url: str, findings: Findings, rng: random.Random) -> None:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(valid("/v1/chat/completions", "ann", rng)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\ncontent-length: {len(body)}"
    whole = f"{head}\r\n\r\n".encode() + body
    kind = rng.randrange(5)
    with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
        if kind == 0:
            writer.write(rng.randbytes(rng.randrange(1, 400)))
        elif kind == 1:
            writer.write(whole[: rng.randrange(len(whole))])
        elif kind == 2:
            writer.write(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        elif kind == 3:
            writer.write(whole * 3)
        else:
            writer.write(whole)
            await asyncio.sleep(rng.random() * 0.02)
            writer.transport.abort()
        async with asyncio.timeout(3):
            line = (await reader.readline()).decode("latin-1")
            if " 500 " in line:
                findings.wrong.append(f"a socket got {line}")
            findings.statuses[line.split(" ")[1] if line.count(" ") > 1 else "closed"] += 1
    findings.sent += 1
    writer.transport.abort()


async def storm(url: str, findings: Findings, count: int, seed: int) -> None:
    """`count` requests, sixteen at once."""
    rng = random.Random(seed)
    left = iter(range(count))

    async def attack() -> None:
        for number in left:
            own = random.Random(rng.random())
            if number % 25 == 0:
                await socket_abuse(url, findings, own)
            elif number % 10 == 0:
                await stranger(client, findings, own)
            elif number % 40 == 7:
                await agent(client, findings, own)
            else:
                await garbage(client, findings, own)

    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(attack() for _ in range(16)))
        got = await client.get("/healthz")
        assert got.status_code == 200, "it is still there"


def document_cases(url: str, findings: Findings, examples: int) -> None:
    """schemathesis: `examples` right and as many wrong cases of each operation."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode

    document = httpx2.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    quick = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in GenerationMode:

            @quick
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                got = case.call(base_url=url, headers={"authorization": "Bearer ann"}, timeout=60)
                what = f"{case.method} {case.formatted_path} {case.body!r:.300}"
                findings.note(got.status_code, got.text, what)
                declared = case.operation.definition.raw["responses"]
                if str(got.status_code) not in declared:
                    findings.wrong.append(f"{what}: {got.status_code} is not in the document")

            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong where nothing is asked for
                check()


def attack(requests: int, seed: int, *, examples: int) -> Findings:
    """All of it; `examples` of each operation and mode come from the document."""
    findings = Findings()
    with hostile_site(findings) as (url, recorder):
        document_cases(url, findings, examples)
        asyncio.run(storm(url, findings, requests - findings.sent, seed))
        owners: dict[str, set[str]] = {}
        for turn in recorder.turns:
            owners.setdefault(turn.session_id, set()).add(turn.owner.tenant)
        crossed = [session for session, tenants in owners.items() if len(tenants) > 1]
        findings.wrong += [f"session {session} was recorded for two tenants" for session in crossed]
        findings.wrong += ["an event was noted for a stranger"] * len(recorder.events)
    return findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    outcome = attack(given_.requests, given_.seed, examples=given_.examples)
    print(f"{outcome.sent} requests: {dict(outcome.statuses)}")
    print("\n".join(outcome.wrong[:20]) or "0 findings")
    sys.exit(bool(outcome.wrong))
