"""A real HTTP server on loopback that a webhook posts to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 120.0
"""Seconds in which an event must have come."""


class Received:
    """Keeps what was posted. The next answers to posts have the `statuses`, and all others 200."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}
        """Headers of these answers."""
        self.posts = 0
        self.body = b""
        """Body of answers with the status 200."""
        self.bodies: list[bytes] = []
        """Bodies of the next answers with any status, before `body`."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until `holds`."""
        ends = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < ends, self.events
            time.sleep(0.01)


@contextmanager
def webhook_server() -> Iterator[Received]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.posts += 1
            status = received.statuses.pop(0) if received.statuses else 200
            if status == 200:
                received.events.append(json.loads(body))
            self.send_response(status)
            body = b""
            if received.bodies:
                body = received.bodies.pop(0)
            elif status == 200:
                body = received.body
            for name, value in {
                "Content-Length": str(len(body)),
                **(received.headers if status != 200 else {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_port}/KEY")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
