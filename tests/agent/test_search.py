"""The web search against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from etude.agent.recipe import BASIC, AgentRecipe
from etude.agent.search import search_of
from etude.agent.tool import Found, ProviderError

ONE = {"title": "A\ntitle", "url": "https://x.example/1", "content": "a  passage", "engine": "e", "score": 1.0}


@contextmanager
def backend(body: bytes, status: int = 200, *, is_cut: bool = False) -> Iterator[tuple[str, list[str]]]:
    """(its address, the paths that it is asked for)"""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + is_cut))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/search?q={{query}}&format=json&key=SECRET", asked
    finally:
        server.shutdown()
        server.server_close()


def find(url: str, query: str = "a b&c") -> list[Found]:
    search = search_of(AgentRecipe(tools=(*BASIC, "web_search"), search_url=url))
    assert search is not None
    return list(asyncio.run(search(query)))  # type: ignore[arg-type]


def test_the_query_is_quoted_and_the_first_results_come_back_on_one_line_each() -> None:
    many = [ONE, {"url": "https://x.example/2", "content": None}, *([ONE] * 9)]
    with backend(json.dumps({"query": "q", "results": many}).encode()) as (url, asked):
        found = find(url)
    assert asked == ["/search?q=a%20b%26c&format=json&key=SECRET"]
    assert found[:2] == [Found("A title", "https://x.example/1", "a passage"), Found("", "https://x.example/2", "")]
    assert len(found) == 5


@pytest.mark.parametrize(
    ("body", "status", "is_cut", "says"),
    [
        (b"", 503, False, "answered 503"),
        (b"<html>", 200, False, "something else than results"),
        (b'{"results": [{"title": "no address"}]}', 200, False, "something else than results"),
        (b'"\xff"', 200, False, "something else than results"),
        (b" " * (5 << 20), 200, False, "too much"),
        (b"{", 200, True, "cannot be reached"),
    ],
)
def test_what_is_wrong_with_the_backend_is_said_without_its_key(
    body: bytes, status: int, is_cut: bool, says: str
) -> None:
    with backend(body, status, is_cut=is_cut) as (url, _), pytest.raises(ProviderError, match=says) as raised:
        find(url)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/{query}", "nonsense {query}", "http://[::1/{query}"])
def test_no_backend_is_the_providers_error(url: str) -> None:
    with pytest.raises(ProviderError, match="cannot be reached"):
        find(url)


def test_without_an_address_nothing_is_asked() -> None:
    assert search_of(AgentRecipe()) is None
