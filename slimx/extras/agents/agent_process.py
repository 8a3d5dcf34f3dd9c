"""Agents as programs: one process per rollout, ended with it."""

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
"""Bytes of a program's output that are kept, from its end."""
MAX_WRITTEN = 64 << 20
"""Maximum output of a program on stdout, and on stderr, in bytes."""
GRACE_S = 2.0
"""Seconds that a program has to exit when its rollout is over, and again after SIGKILL."""
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables of the run that programs inherit: for starting programs and finding files, no secrets."""


async def run_command(
    command: Sequence[str],
    base_url: str,
    prompt: Prompt,
    variables: Sequence[str] = (),
    metadata: Sequence[str] = (),
) -> str:
    """Runs a program that samples through `base_url`; returns the end of its standard output.

    Its environment contains ALLOWED and `variables` of the run's, and OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which the official clients read; none of the run's tokens or keys. Its
    stdin has the prompt as a line of JSON, {"id", "messages", "metadata"}: never the answer, and only the keys
    `metadata` of the metadata, where data sets keep solutions and tests. A guard process ends the program and its
    descendants with this call.
    Raises SlimxError, with the end of stderr, if the program fails or writes too much.
    """
    environment = {name: os.environ[name] for name in (*ALLOWED, *variables) if name in os.environ}
    environment |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
    # Anthropic's clients append /v1 themselves.
    environment |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
    bypass_proxies(environment, [urlsplit(base_url).hostname or ""])  # `variables` may name a proxy
    visible = {key: prompt.metadata[key] for key in metadata if key in prompt.metadata}
    line = json.dumps({"id": prompt.id, "messages": prompt.messages, "metadata": visible}).encode() + b"\n"
    # Shielded: a cancelled start would leave an unknown process behind.
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
            f"{command[0]} {how_ended(process.returncode)}: {err or 'nothing was printed'}",
            code="agent.status",
            about=command[0],
        )
    return out


async def _end_of(stream: asyncio.StreamReader, program: str) -> str:
    """Reads a program's output to its end and returns the last MAX_OUTPUT bytes. Raises SlimxError after MAX_WRITTEN
    bytes."""
    tail = b""
    total = 0
    while piece := await stream.read(65536):
        tail = (tail + piece)[-MAX_OUTPUT:]
        total += len(piece)
        if total > MAX_WRITTEN:
            raise SlimxError(
                f"{program} wrote more than {MAX_WRITTEN >> 20} MiB of output; have it write to a file",
                code="agent.output",
                about=program,
            )
    return tail.decode(errors="replace").strip()


async def _write(stream: asyncio.StreamWriter, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program may not read its input
        stream.write(line)
        await stream.drain()
    stream.close()


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Ends the guard, if it could be started, and its descendants."""
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
