"""A hub's slice endpoint for tests of downloads: serves bytes with Range, and misbehaves on demand."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class SliceHub:
    """What is served, and how. `asked` are the Range and If-None-Match headers that came."""

    data: bytes
    cut_after: list[int] = field(default_factory=list)  # Of each answer's body, then disconnect.
    digest_of: bytes | None = None  # Announced; None: the truth.
    asked: list[tuple[str | None, str | None]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # Errors to answer first.
    url: str = ""
    sent: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256(
            self.digest_of if self.digest_of is not None else self.data
        ).hexdigest()


@contextmanager
def slice_hub(data: bytes) -> Iterator[SliceHub]:
    hub = SliceHub(data)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/node-challenge":
                self._json({"hub": "ab" * 32, "nonce": "cd" * 32, "expires_s": 60.0})
            else:
                self._json({"node": "ef" * 16, "token": "t", "scope": "node", "expires_s": 900.0})

        def _json(self, content: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            hub.asked.append((self.headers.get("Range"), self.headers.get("If-None-Match")))
            if hub.statuses:
                detail = {"message": "no", "type": "server_error", "code": "no"}
                self._json({"error": detail}, hub.statuses.pop(0))
                return
            if self.headers.get("If-None-Match") == f'"{hub.sha256}"':
                self.send_response(304)
                self.end_headers()
                return
            start = 0
            is_same = self.headers.get("If-Range", f'"{hub.sha256}"') == f'"{hub.sha256}"'
            if "Range" in self.headers and is_same:
                start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            digest = base64.b64encode(bytes.fromhex(hub.sha256)).decode()
            self.send_response(206 if start else 200)
            if start:
                size = len(hub.data)
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Length", str(len(hub.data) - start))
            self.send_header("ETag", f'"{hub.sha256}"')
            self.send_header("Repr-Digest", f"sha-256=:{digest}:")
            self.end_headers()
            cut = hub.cut_after.pop(0) if hub.cut_after else None
            body = hub.data[start:][:cut]
            self.wfile.write(body)
            hub.sent += len(body)
            self.close_connection = True

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
