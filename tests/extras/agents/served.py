"""Servers of tests: programs that listen on loopback, and stand-ins in this process that misbehave."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
from aiohttp import web

from slimx.runtime.ports import free_port

START_S = 300.0
"""Seconds for a server to listen; for hangs only."""


@contextmanager
def program(python: str, script: str, log: Path) -> Iterator[str]:
    """Yields the URL of `script`, of this directory, which listens at its port argument."""
    port = free_port()
    command = [python, str(Path(__file__).with_name(script)), str(port)]
    with log.open("w") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, cwd=log.parent)
    try:
        until = time.monotonic() + START_S
        while time.monotonic() < until and not listens(process.pid, port):
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def listens(pid: int, port: int) -> bool:
    return any(
        connection.status == "LISTEN" and connection.laddr.port == port
        for connection in psutil.Process(pid).net_connections()
    )


@asynccontextmanager
async def stand_in(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yields the URL of a server that answers every request with `answer`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
