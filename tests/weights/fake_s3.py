"""A tiny S3 on loopback: put (with or without If-None-Match), get, head, list, delete. Signatures are not checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, float]]
    lock: threading.Lock
    conditional: bool
    authorizations: list[str]

    def log_message(self, *args: object) -> None:
        pass

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.authorizations.append(self.headers.get("Authorization", ""))
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            if self.conditional and self.headers.get("If-None-Match") == "*" and self._key() in self.objects:
                return self._answer(412)
            self.objects[self._key()] = (data, time.time())
        self._answer(200, ETag='"x"')

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._list(query.get("prefix", [""])[0], query.get("start-after", [""])[0])
        self._object(body=True)

    def do_HEAD(self) -> None:
        self._object(body=False)

    def _object(self, *, body: bool) -> None:
        if self._key() not in self.objects:
            return self._answer(404)
        data, modified = self.objects[self._key()]
        headers = {"ETag": '"x"', "Last_Modified": formatdate(modified, usegmt=True)}
        self._answer(200, data if body else b"", Content_Length=str(len(data)), **headers)

    def do_DELETE(self) -> None:
        self.objects.pop(self._key(), None)
        self._answer(204)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        keys = [piece.partition("</Key>")[0] for piece in body.split("<Key>")[1:]]
        for key in keys:
            self.objects.pop(key, None)
        rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f'<?xml version="1.0"?><DeleteResult>{rows}</DeleteResult>'.encode())

    def _list(self, prefix: str, after: str) -> None:
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(modified)}</LastModified><ETag>&quot;x&quot;</ETag>"
            f"<Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, (data, modified) in sorted(self.objects.items())
            if key.startswith(prefix) and key > after
        )
        body = f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>'
        self._answer(200, body.encode())


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


@contextmanager
def fake_s3(*, conditional: bool) -> Iterator[tuple[str, list[str]]]:
    """Endpoint URL, and the Authorization headers that it saw. `conditional=False` ignores If-None-Match."""
    seen: list[str] = []
    attributes = {"objects": {}, "lock": threading.Lock(), "conditional": conditional, "authorizations": seen}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), attributes))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
