"""A real S3 gateway for the tests of a session, and a proxy before it that misbehaves on demand."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

SCRIPT = Path(__file__).with_name("s3-gateway")
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "ceph-authtool", "radosgw-admin")


def free_ports() -> int:
    """The first of three free ports in a row."""
    for port in range(17480, 18480, 10):
        with contextlib.ExitStack() as stack:
            try:
                for near in range(3):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + near))
            except OSError:
                continue
            return port
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def s3_gateway(folder: Path) -> Iterator[str]:
    """Its URL. Skips the test where the programs are missing."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs {missing[0]}: apt-get install ceph-mon ceph-osd radosgw ceph-common")
    try:
        done = subprocess.run(
            ["bash", SCRIPT, folder, str(free_ports())], stdout=subprocess.PIPE, text=True, timeout=120, check=True
        )
        yield done.stdout.split()[-1]
    finally:
        subprocess.run(["bash", SCRIPT, folder, "stop"], check=False)


def environment(endpoint: str) -> dict[str, str]:
    """What lets obstore speak to a gateway at `endpoint`."""
    return {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_TIMEOUT": "3s"}  # fmt: skip


def make_bucket(endpoint: str) -> str:
    """The URL of a store in a new bucket."""
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    options: dict[str, Any] = {"bucket": name, "endpoint": f"{endpoint}/{name}", "access_key_id": "test",
                               "secret_access_key": "testsecret", "region": "us-east-1", "allow_http": True,
                               "virtual_hosted_style_request": True}  # fmt: skip
    with contextlib.suppress(BaseError):  # a bucket's answer has no ETag, which obstore misses
        obstore.put(S3Store(**options), "", b"")
    return f"s3://{name}/weights"


# A proxy


@dataclass
class Rule:
    """What befalls requests of a method whose path matches, so many times."""

    method: str
    path: str
    what: str
    """flip, truncate, refuse (500), stall, lose (the request never arrives), forget (its answer never does)."""
    times: int = 1
    then: Callable[[], None] = lambda: None
    """Runs after it happened."""


@dataclass
class Proxy:
    """Before a gateway. `rules` may be changed at any time."""

    endpoint: str
    rules: list[Rule] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rule_for(self, method: str, path: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                if rule.times > 0 and rule.method == method and re.search(rule.path, path):
                    rule.times -= 1
                    self.happened.append(f"{rule.what} {method} {path}")
                    return rule
        return None


@contextlib.contextmanager
def proxy(gateway: str) -> Iterator[Proxy]:
    """A proxy on a port of its own."""
    found = Proxy("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            rule = found.rule_for(self.command, self.path)
            what = rule.what if rule else ""
            if what == "lose":
                return self._hang_up(rule)
            if what == "refuse":
                return self._answer(500, {}, b"", rule)
            backend = http.client.HTTPConnection(gateway.removeprefix("http://"), timeout=30)
            backend.request(self.command, self.path, body, dict(self.headers))
            answer = backend.getresponse()
            data = answer.read()
            backend.close()
            if what == "forget":
                return self._hang_up(rule)
            if what == "stall":
                time.sleep(8)
            if what == "flip" and data:
                data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
            headers = {name: value for name, value in answer.getheaders()
                       if name.lower() not in ("transfer-encoding", "connection", "content-length")}  # fmt: skip
            if self.command == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length") or "0"
            return self._answer(answer.status, headers, data, rule, cut=what == "truncate")

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass

        def _answer(
            self, status: int, headers: dict[str, str], data: bytes, rule: Rule | None, *, cut: bool = False
        ) -> None:
            with contextlib.suppress(OSError):
                self.send_response(status)
                if self.command != "HEAD":
                    headers["Content-Length"] = str(len(data))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                self.wfile.flush()
            if cut:
                self._hang_up(None)
            if rule:
                rule.then()

        def _hang_up(self, rule: Rule | None) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            if rule:
                rule.then()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
