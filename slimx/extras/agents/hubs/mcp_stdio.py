"""Transport for the official MCP SDK that runs a server as a process and bounds the length of its responses.

Replaces the SDK's transport, which reads lines of any length.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from slimx.extras.agents.asyncio_processes import ended
from slimx.extras.agents.hubs.mcp_bounds import Stderr
from slimx.extras.http.responses import MAX_RESPONSE

END_S = 2.0
"""Seconds within which a server must exit after its input is closed, and again after SIGTERM and after SIGKILL."""


@asynccontextmanager
async def started(
    command: Sequence[str], environment: Mapping[str, str], directory: str | None, stderr: Stderr
) -> AsyncIterator[Any]:
    """Starts a server and yields the transport's two streams; stops the server after the block.

    A response of more than `MAX_RESPONSE` bytes closes the session. `environment`: environment variables for the server
    in addition to the SDK's default ones. `directory`: working directory. `stderr`: buffer for the server's standard
    error.
    """
    import anyio
    from mcp.client.stdio import get_default_environment

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr.file,
        env=get_default_environment() | dict(environment),
        cwd=directory,
        start_new_session=True,
        limit=MAX_RESPONSE,
    )
    received, read = anyio.create_memory_object_stream[Any](0)
    write, sent = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_receive(process, received, stderr)),
        asyncio.create_task(_send(process, sent, received)),
    ]
    try:
        yield read, write
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (read, write, received, sent):
            stream.close()
        await _end(process)


async def _receive(process: asyncio.subprocess.Process, received: Any, stderr: Stderr) -> None:
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    async with received:  # closing it fails the pending calls
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                stderr.note = f"a response has more than {MAX_RESPONSE} bytes"
                return
            if not line:
                return
            try:
                message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                message = error
            await received.send(message)


async def _send(process: asyncio.subprocess.Process, sent: Any, received: Any) -> None:
    assert process.stdin is not None
    async with sent:
        with suppress(ConnectionError):
            async for message in sent:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(f"{line}\n".encode(errors="replace"))
                await process.stdin.drain()
            return
    received.close()  # the server no longer reads requests, so it will not respond


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stops a server and its descendants: closes its input, then sends SIGTERM, then SIGKILL."""
    assert process.stdin is not None
    process.stdin.close()
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        if signum is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        if await ended(process, END_S):
            return
