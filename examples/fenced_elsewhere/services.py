"""Two services that check fencing tokens, on a free port of this machine, as real ones should.

`Shop` is an HTTP API that honours `Idempotency-Key` and `X-Fencing-Token`. `Bucket` is an object
store with the conditional writes of S3 (`If-Match`, `If-None-Match`). Both keep their data in
memory.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


class Shop:
    """POST /charges once per `Idempotency-Key`; PUT /… not with an older `X-Fencing-Token`."""

    def __init__(self) -> None:
        self.charges: list[dict] = []
        self.requests = 0
        self.resources: dict[str, tuple[int, bytes]] = {}
        self._answered: dict[str, tuple[bytes, Answer]] = {}

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Called by one thread at a time, so that a second request waits for the first's answer."""
        if method == "POST" and path == "/charges":
            return self._charge(headers.get("Idempotency-Key"), body)
        if method == "PUT":
            return self._put(path, headers.get("X-Fencing-Token", ""), body)
        return 404, {}, b""

    def _charge(self, key: str | None, body: bytes) -> Answer:
        self.requests += 1
        if not key:
            return 400, {}, b"no Idempotency-Key"
        if key in self._answered:
            first_body, answer = self._answered[key]
            return answer if body == first_body else (422, {}, b"another request had this key")
        self.charges.append(json.loads(body))
        answer = 201, {}, json.dumps({"charge": f"ch_{len(self.charges)}"}).encode()
        # A real service commits the charge and its answer in one transaction.
        self._answered[key] = body, answer
        return answer

    def _put(self, path: str, token: str, body: bytes) -> Answer:
        if not token.isdecimal():
            return 400, {}, b"no X-Fencing-Token"
        newest, _ = self.resources.get(path, (0, b""))
        if int(token) < newest:
            return 412, {"X-Fencing-Token": str(newest)}, b"a newer token has been here"
        self.resources[path] = int(token), body
        return 200, {}, b""


class Bucket:
    """GET and PUT of objects. The ETag is the MD5 of the content alone, as S3's mostly is."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}  # content, fence from its metadata

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Called by one thread at a time: compared and written in one step."""
        found = self.objects.get(path)
        etag = None if found is None else _etag(found[0])
        if method == "GET":
            if found is None:
                return 404, {}, b"NoSuchKey"
            return 200, {"ETag": _etag(found[0]), "x-amz-meta-fence": found[1]}, found[0]
        if headers.get("If-None-Match") == "*" and found is not None:
            return 412, {}, b"PreconditionFailed"
        wanted = headers.get("If-Match")
        if wanted is not None and wanted != etag:
            return (404, {}, b"NoSuchKey") if found is None else (412, {}, b"PreconditionFailed")
        self.objects[path] = body, headers.get("x-amz-meta-fence", "")
        return 200, {"ETag": _etag(body)}, b""


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


@contextmanager
def serve(service: Shop | Bucket) -> Iterator[str]:
    """Its URL, for the time of a `with` block."""
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with one_at_a_time:
                status, headers, answer = service.answer(
                    self.command, self.path, self.headers, body
                )
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815  # http.server's names

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
