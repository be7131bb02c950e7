"""Keys, quotas, limits, pins, probes, drain, clients that go away: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from etude.errors import EngineError, OverloadedError, RecipeError, StoreError
from etude.protocols import Consent, GenerateRequest, Owner
from etude.serve.keys import Keys, Quota, hash_of, new_key
from etude.serve.recipe import ServeRecipe
from etude.types import Version
from serve.speaking import MemoryRecorder, Site, Speaker, keys_of, says, serving

ASK: dict[str, Any] = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ANN = Owner(tenant="acme", user="ann", consent=Consent.TRAIN, retention_days=30)
BOB = Owner(tenant="other", user="bob", consent=Consent.KEEP)
SILENT = Owner(tenant="acme", user="cyd", consent=Consent.NONE)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def visit(script: Any, body: Callable[[httpx2.AsyncClient, Site], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with serving(script, **settings) as site, httpx2.AsyncClient(base_url=site.url, timeout=20) as client:
            await body(client, site)

    asyncio.run(run())


class Slow(Speaker):
    """Waits before every chunk."""

    def __init__(self, script: Any, wait_s: float = 0.05) -> None:
        super().__init__(script)
        self.wait_s, self.closed = wait_s, 0

    async def generate(self, request: GenerateRequest) -> Any:
        try:
            async for chunk in super().generate(request):
                await asyncio.sleep(self.wait_s)
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            self.closed += 1
            raise


def test_a_key_is_asked_for_and_names_the_owner() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        for path, headers in ((CHAT, {}), (CHAT, bearer("no")), (CHAT, {"authorization": "Basic ann"})):
            got = await client.post(path, json=ASK, headers=headers)
            assert got.status_code == 401
            assert got.json()["error"]["type"] == "authentication_error"
        got = await client.post(MESSAGES, json=ASK, headers={"x-api-key": "no"})
        assert (got.status_code, got.json()["type"]) == (401, "error")
        assert (await client.post(CHAT, json=ASK, headers=bearer("ann"))).status_code == 200
        assert (await client.post(MESSAGES, json={**ASK, "max_tokens": 9}, headers={"x-api-key": "bob"})).is_success
        assert [turn.owner for turn in site.recorder.turns] == [ANN, BOB]
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200

    visit([says("ok")], body, keys=keys_of(ann=(ANN, Quota()), bob=(BOB, Quota())))


def test_nothing_is_stored_without_consent() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        assert (await client.post(CHAT, json=ASK, headers=bearer("cyd"))).status_code == 200
        assert site.recorder.turns == []

    visit([says("ok")], body, keys=keys_of(cyd=(SILENT, Quota())))


def test_no_window_session_or_feedback_crosses_from_key_to_key() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        first = await client.post(CHAT, json=ASK, headers={**bearer("ann"), "x-etude-session": "s"})
        session = first.headers["x-etude-session"]
        reply = first.json()["choices"][0]["message"]["content"]
        history = [*ASK["messages"], {"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
        for name in ("s", session, ""):
            headers = {**bearer("bob"), "x-etude-session": name}
            got = await client.post(CHAT, json={**ASK, "messages": history}, headers=headers)
            assert got.headers["x-etude-session"] != session
        assert [str(turn.opened) for turn in site.recorder.turns[1:]] == ["client_rewrite"] * 3
        event = {"session": session, "kind": "kept", "value": 0.5}
        assert (await client.post("/feedback", json=event, headers=bearer("bob"))).status_code == 404
        assert (await client.post("/feedback", json=event, headers=bearer("ann"))).status_code == 200
        assert [(owner.tenant, event.value) for owner, event in site.recorder.events] == [("acme", 0.5)]

    visit([says("ok")], body, keys=keys_of(ann=(ANN, Quota()), bob=(BOB, Quota())))


def test_quotas_say_when_to_come_again() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        async def ask(key: str) -> httpx2.Response:
            return await client.post(CHAT, json=ASK, headers=bearer(key))

        assert [(await ask("minute")).status_code for _ in range(3)] == [200, 200, 429]
        got = await ask("minute")
        assert 1 <= int(got.headers["retry-after"]) <= 60
        assert got.json()["error"]["type"] == "rate_limit_error"
        assert [(await ask("day")).status_code for _ in range(2)] == [200, 429]
        assert int((await ask("day")).headers["retry-after"]) <= 86_400
        both = await asyncio.gather(ask("once"), ask("once"), ask("once"))
        assert sorted(one.status_code for one in both) == [200, 429, 429]
        assert (await ask("once")).status_code == 200

    quotas = {"minute": Quota(requests_per_minute=2), "day": Quota(tokens_per_day=5), "once": Quota(concurrent=1)}
    visit(Slow([says("ok")]), body, keys=keys_of(**{name: (ANN, quota) for name, quota in quotas.items()}))


@pytest.mark.parametrize(
    ("body_of", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 50_000, 400, "got `array`"),
        (json.dumps({**ASK, "metadata": json.loads("[" * 80 + "]" * 80)}).encode(), 400, "metadata"),
        (json.dumps({**ASK, "metadata": {"a": json.loads("[" * 80 + "]" * 80)}}).encode(), 400, "levels"),
        (json.dumps({**ASK, "x": "y" * 70_000}).encode(), 413, "larger"),
        (json.dumps({**ASK, "messages": ASK["messages"] * 30}).encode(), 400, "limit is 20"),
        (json.dumps({"messages": ASK["messages"]}).encode(), 400, "model"),
        (b'{"model":"qwen","messages":[{"role":"user","content":"\\ud800"}]}', 400, "not JSON"),
    ],
)
def test_a_request_beyond_a_limit_is_refused(body_of: bytes, status: int, words: str) -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        for path in (CHAT, MESSAGES):
            data = (
                body_of.replace(b"{", b'{"max_tokens":9,', 1) if path == MESSAGES and body_of[:2] == b'{"' else body_of
            )
            got = await client.post(path, content=data)
            assert got.status_code == status, got.text
            assert words in got.json()["error"]["message"]

    visit([says("ok")], body, max_body_bytes=65_536, max_messages=20)


def test_a_prompt_that_does_not_fit_is_refused_in_words_that_clients_know() -> None:
    class Small:
        max_context = 8

        def __getattr__(self, name: str) -> Any:
            from serve.speaking import QwenChat

            return getattr(QwenChat(), name)

    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        got = await client.post(CHAT, json=ASK)
        assert (got.status_code, got.json()["error"]["code"]) == (400, "context_length_exceeded")
        got = await client.post(MESSAGES, json={**ASK, "max_tokens": 5})
        assert got.json()["error"]["message"].startswith("prompt is too long: 9 tokens > 7 maximum")

    visit([says("ok")], body, chat=Small())


def test_a_version_can_be_asked_for() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        async def ask(path: str = CHAT, **headers: str) -> httpx2.Response:
            named = {f"x-etude-{name.replace('_', '-')}": value for name, value in headers.items()}
            return await client.post(path, json={**ASK, "max_tokens": 9}, headers=named)

        good = await ask(exact_version="1.1", min_step="1")
        assert (good.status_code, good.headers["x-etude-version"]) == (200, "1.1")
        assert site.engine.requests[0].min_step == 1
        assert site.engine.requests[0].exact == Version(incarnation=1, n=1, step=1)
        for path in (CHAT, MESSAGES):
            other = await ask(path, exact_version="1.2")
            assert other.status_code == 409
            assert other.json()["error"]["type"] == "version_error"
        assert (await ask(min_step="x")).status_code == 400

    visit([says("ok")], body)


@pytest.mark.parametrize(("error", "status"), [(OverloadedError("full"), 503), (EngineError("died: /secret"), 503)])
def test_an_engine_that_fails_is_told_without_its_insides(error: Exception, status: int) -> None:
    class Failing(Speaker):
        async def generate(self, request: GenerateRequest) -> Any:
            raise error
            yield

    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        got = await client.post(CHAT, json=ASK)
        assert (got.status_code, "secret" in got.text) == (status, False)
        assert got.headers["retry-after"]
        anthropic = await client.post(MESSAGES, json={**ASK, "max_tokens": 9})
        assert anthropic.status_code == (529 if isinstance(error, OverloadedError) else 503)

    visit(Failing([says("ok")]), body)


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        site.engine.errors = {number: EngineError("died") for number in range(9)}
        for path, event in ((CHAT, '"error"'), (MESSAGES, "event: error"), ("/v1/responses", "response.failed")):
            sent = {**ASK, "stream": True, "max_tokens": 99, "input": "hi"}
            got = await client.post(path, json=sent)
            assert got.status_code == 200
            assert event in got.text
            assert "[DONE]" not in got.text
        assert site.recorder.turns == []

    visit([says("one two three four five six")], body)


def test_the_end_is_said_only_once_the_turn_is_kept() -> None:
    order: list[str] = []

    class Recorder(MemoryRecorder):
        async def record(self, turn: Any) -> None:
            await asyncio.sleep(0.1)
            order.append("kept")

    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        for path, end in ((CHAT, 'finish_reason":"stop'), (MESSAGES, "message_stop"), ("/v1/responses", "completed")):
            order.clear()
            sent = {**ASK, "stream": True, "max_tokens": 99, "input": "hi"}
            async with client.stream("POST", path, json=sent) as got:
                async for line in got.aiter_lines():
                    order.append("end" if end in line else "text")
            assert order.index("text") < order.index("kept") < order.index("end")

    visit([says("one two three four five six")], body, recorder=Recorder())


def test_an_answer_that_cannot_be_kept_is_not_given() -> None:
    class Broken(MemoryRecorder):
        async def record(self, turn: Any) -> None:
            raise StoreError("the disk is full")

    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        got = await client.post(CHAT, json=ASK)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "not_recorded")
        assert "error" in (await client.post(CHAT, json={**ASK, "stream": True})).text

    visit([says("ok")], body, recorder=Broken())


def test_a_client_that_goes_away_ends_its_request() -> None:
    engine = Slow([says("word " * 200)], 0.02)

    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        for stream in (True, False):
            before = engine.closed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.post(CHAT, json={**ASK, "stream": stream})
            for _ in range(100):
                if engine.closed > before:
                    break
                await asyncio.sleep(0.02)
            assert engine.closed == before + 1
        text = (await client.get("/metrics")).text
        assert "etude_cancelled_requests_total 2.0" in text
        assert site.recorder.turns == []
        assert (await client.post(CHAT, json={**ASK, "max_tokens": 3})).status_code == 200

    visit(engine, body)


def test_metrics_and_probes() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        assert (await client.get("/readyz")).json()["version"] == "1.1"
        await client.post(CHAT, json=ASK)
        await client.post(CHAT, json={"model": "x"})
        text = (await client.get("/metrics")).text
        for line in ('etude_requests_total{endpoint="chat_completions",status="200"} 1.0',
                     'etude_requests_total{endpoint="chat_completions",status="400"} 1.0',
                     'etude_contexts_total{opened="task"} 1.0', "etude_recorded_turns_total 1.0",
                     "etude_windows 1.0", "etude_engine_up 1", "etude_engine_step 1"):  # fmt: skip
            assert line in text
        site.engine.version = None
        got = await client.get("/readyz")
        assert (got.status_code, got.json()["error"]["code"]) == (503, "no_version")
        assert (await client.get("/nothing")).json()["error"]["type"] == "not_found_error"
        assert (await client.get(CHAT)).status_code == 405

    visit([says("ok")], body)


def test_draining_finishes_streams_and_refuses_what_is_new() -> None:
    engine = Slow([says("word " * 40)], 0.02)

    async def run() -> None:
        async with serving(engine, drain_s=10.0) as site, httpx2.AsyncClient(base_url=site.url, timeout=20) as client:
            running = asyncio.create_task(client.post(CHAT, json={**ASK, "stream": True}))
            while not engine.requests:
                await asyncio.sleep(0.01)
            closing = asyncio.create_task(site.server.close())
            await asyncio.sleep(0.05)
            late = await client.post(CHAT, json=ASK)
            assert late.status_code == 503
            assert late.headers["retry-after"]
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
            assert (await running).text.endswith("data: [DONE]\n\n")
            await closing

    asyncio.run(run())


def test_draining_ends_in_bounded_time() -> None:
    engine = Slow([says("word " * 4000)], 0.05)

    async def run() -> None:
        async with serving(engine, drain_s=0.2) as site, httpx2.AsyncClient(base_url=site.url, timeout=20) as client:
            running = asyncio.create_task(client.post(CHAT, json=ASK))
            while not engine.requests:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(6):
                await site.server.close()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_a_second_signal_ends_at_once() -> None:
    engine = Slow([says("word " * 4000)], 0.05)

    async def run() -> None:
        async with serving(engine, drain_s=60.0) as site, httpx2.AsyncClient(base_url=site.url, timeout=20) as client:
            running = asyncio.create_task(client.post(CHAT, json=ASK))
            ending = asyncio.create_task(site.server.until_told_to_end())
            while not engine.requests:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            assert not ending.done()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                await ending
                await site.server.close()  # as whoever opened it does
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_slow_heads_and_bodies_end() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        host, port = site.url.removeprefix("http://").split(":")
        for sent in (b"", b"POST /v1/chat", b"POST /x HTTP/1.1\r\nhost: 127.0.0.1\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(3):
                assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{")
        async with asyncio.timeout(3):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 100_000 + b"\r\n\r\n")
        async with asyncio.timeout(3):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()

    visit([says("ok")], body, body_timeout_s=0.3)


def test_pages_of_other_sites_cannot_use_a_server_without_keys() -> None:
    async def body(client: httpx2.AsyncClient, site: Site) -> None:
        for headers in (
            {"origin": "https://evil.example"},
            {"host": "evil.example"},
            {"origin": "null"},
            {"origin": "http://["},
            {"host": "["},
        ):
            assert (await client.post(CHAT, json=ASK, headers=headers)).status_code == 403
        assert (await client.post(CHAT, json=ASK, headers={"origin": "http://localhost:3000"})).status_code == 200

    visit([says("ok")], body)


def test_other_addresses_need_keys() -> None:
    with pytest.raises(RecipeError, match="no keys"):
        ServeRecipe(host="0.0.0.0")
    with pytest.raises(RecipeError, match="no keys"):
        ServeRecipe(host="example.com")
    assert ServeRecipe(host="::1").host == "::1"
    assert ServeRecipe(host="0.0.0.0", keys="keys.toml").port == 8000


def test_a_file_of_keys_is_checked(tmp_path: Path) -> None:
    key, table = new_key("ci", tenant="acme", user="ci")
    path = tmp_path / "keys.toml"
    path.write_text(f"format = 1\n{table}tokens_per_day = 9\n")
    caller = Keys.load(path).find(key)
    assert caller is not None
    assert (caller.owner.tenant, caller.quota.tokens_per_day, caller.owner.consent) == ("acme", 9, Consent.NONE)
    assert key not in path.read_text()
    assert Keys.load(path).find(key[:-1]) is None
    for text, words in (
        ("format = 2\n" + table, "format"),
        ("format = 1\n[keys]\n", "no key"),
        ("format = 1\n" + table + "tokens = 1\n", "tokens"),
        ("format = 1\n" + table.replace(hash_of(key), "ab"), "hash"),
        ("format = 1\n" + table + "concurrent = -1\n", "negative"),
        ("format", "no file of keys"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=words):
            Keys.load(path)
