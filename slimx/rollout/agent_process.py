"""Agents that are programs: one process per rollout, which ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import IO
from urllib.parse import urlsplit

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.runtime.children import bypass_proxies
from slimx.runtime.logs import how_ended

MAX_OUTPUT = 20_000
"""Characters that are kept of the end of what a program writes."""
GRACE_S = 2.0
"""Seconds that a program gets to end when its rollout is over."""
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables of the run that a program gets: what starts programs and finds files, and nothing that is secret."""


async def run_command(command: Sequence[str], base_url: str, prompt: Prompt, variables: Sequence[str] = ()) -> str:
    """Run a program that samples through `base_url`; returns what it wrote to its standard output.

    Its environment has ALLOWED of the run's, `variables`, and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, which the official clients read by themselves: neither the run's tokens nor its keys. It finds
    the prompt as a line of JSON, {"id", "messages", "metadata"}, on its standard input: never the answer. Cancelled,
    its whole process group is ended.
    Raises SlimxError, with the end of what it wrote to standard error, if it fails.
    """
    environment = {name: os.environ[name] for name in (*ALLOWED, *variables) if name in os.environ}
    environment |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
    # Anthropic's clients write the /v1 themselves.
    environment |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
    bypass_proxies(environment, [urlsplit(base_url).hostname or ""])  # `variables` may name a proxy
    told = {"id": prompt.id, "messages": prompt.messages, "metadata": prompt.metadata}
    # Files, so that a program that writes a lot neither waits for a reader nor fills the driver's memory.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Shielded: cancelled in its middle, the start would leave a process that nobody knows of.
        start = asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        starting = asyncio.ensure_future(start)
        try:
            process = await asyncio.shield(starting)
            await process.communicate(json.dumps(told).encode() + b"\n")
        finally:
            await asyncio.shield(_end(starting))
        if process.returncode:
            raise SlimxError(
                f"{command[0]} {how_ended(process.returncode)}: {_tail(err) or 'nothing was printed'}",
                code="agent.status",
                about=command[0],
            )
        return _tail(out)


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """End the process, if it could be started, and those that it started."""
    await asyncio.wait({starting})
    if starting.exception() is not None:
        return
    process = starting.result()
    with contextlib.suppress(TimeoutError, ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            await asyncio.wait_for(process.wait(), GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
    return file.read().decode(errors="replace").strip()
