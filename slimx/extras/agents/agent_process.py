"""Runs agents that are programs: one process per rollout, which is killed at the end of the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from urllib.parse import urlsplit

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.agents.asyncio_processes import ended
from slimx.runtime.children import bypass_proxies
from slimx.runtime.logs import how_ended
from slimx.runtime.process import guarded_argv, kill_descendants
from slimx.runtime.tasks import in_thread

MAX_OUTPUT = 20_000
"""Maximum length of a program's output that is kept, in bytes; the beginning is dropped."""
MAX_WRITTEN = 64 << 20
"""Maximum size in bytes of everything that a program writes to stdout, and likewise to stderr."""
GRACE_S = 2.0
"""Seconds within which a program must exit after its rollout is over, and again after SIGKILL."""
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables of the run that programs inherit. They serve to start programs and find files, and contain no
secrets."""


async def run_command(
    command: Sequence[str],
    base_url: str,
    prompt: Prompt,
    variables: Sequence[str] = (),
    metadata: Sequence[str] = (),
) -> str:
    """Runs a program that samples through `base_url`, and returns the end of its standard output.

    The program's environment contains those of the run's variables that `ALLOWED` or `variables` names, and
    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which the official clients read, but none
    of the run's tokens or keys. Its stdin contains the prompt as one line of JSON, {"id", "messages", "metadata"},
    without the answer and with only those keys of the prompt's metadata that `metadata` lists, because data sets keep
    solutions and tests there. A guard process kills the program and its descendants when this call ends. Raises
    SlimxError, with the end of stderr, if the program fails or writes too much.
    """
    environment = {name: os.environ[name] for name in (*ALLOWED, *variables) if name in os.environ}
    environment |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
    # Anthropic's clients append /v1 to the base URL.
    environment |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
    bypass_proxies(environment, [urlsplit(base_url).hostname or ""])  # `variables` may contain an HTTP proxy
    visible = {key: prompt.metadata[key] for key in metadata if key in prompt.metadata}
    line = json.dumps({"id": prompt.id, "messages": prompt.messages, "metadata": visible}).encode() + b"\n"
    # Shielded, because a cancelled start would leave an untracked process behind.
    start = asyncio.create_subprocess_exec(
        *guarded_argv(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    starting = asyncio.ensure_future(start)
    try:
        process = await asyncio.shield(starting)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        out, err, _, _ = await asyncio.gather(
            _end_of(process.stdout, command[0]),
            _end_of(process.stderr, command[0]),
            _write(process.stdin, line),
            process.wait(),
        )
    finally:
        await asyncio.shield(_end(starting))
    if process.returncode:
        raise SlimxError(
            f"the agent {command[0]} {how_ended(process.returncode)} ({err or 'no output on stderr'}); fix the "
            "agent's program so that it exits with status 0",
            code="agent.status",
            about=command[0],
        )
    return out


async def _end_of(stream: asyncio.StreamReader, program: str) -> str:
    """Reads a program's output to its end and returns the last `MAX_OUTPUT` bytes.

    `program`: the program's name in the SlimxError that is raised after `MAX_WRITTEN` bytes.
    """
    tail = b""
    total = 0
    while piece := await stream.read(65536):
        tail = (tail + piece)[-MAX_OUTPUT:]
        total += len(piece)
        if total > MAX_WRITTEN:
            raise SlimxError(
                f"the agent {program} wrote more than {MAX_WRITTEN >> 20} MiB to stdout or stderr; make the agent "
                "write its output to a file instead",
                code="agent.output",
                about=program,
            )
    return tail.decode(errors="replace").strip()


async def _write(stream: asyncio.StreamWriter, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # raised if the program does not read its input
        stream.write(line)
        await stream.drain()
    stream.close()


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Kills the guard process, if it was started, and its descendants."""
    await asyncio.wait({starting})
    if starting.exception() is not None:
        return
    process = starting.result()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        await ended(process, GRACE_S)
    if process.returncode is None:
        with contextlib.suppress(SlimxError):
            await in_thread(kill_descendants, process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await ended(process, GRACE_S)
