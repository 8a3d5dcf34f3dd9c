"""The stacks of a run that hangs are written down before the parts that hang are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from slimx.errors import DeadlineError, SlimxError
from slimx.observability.live.stacks import write_stacks
from slimx.runtime.tasks import in_thread

WRITE_S = 45.0
"""Seconds for all stacks; the end of a run does not wait longer for them."""

SILENT = ("rank.silent", "engine.silent", "engine.useless")
"""Codes of errors of parts that did not answer, or not with what they were asked for."""


def hangs(error: BaseException) -> bool:
    """True for an error that says who was waited for in vain."""
    return isinstance(error, DeadlineError) or (isinstance(error, SlimxError) and error.code in SILENT)


async def keep_stacks(directory: Path, note: Callable[[str], None], error: BaseException) -> None:
    """Write the stacks of this machine's processes to RUN/stacks if `error` is that somebody hangs; does not raise."""
    if not hangs(error):
        return
    try:
        async with asyncio.timeout(WRITE_S):
            file = await in_thread(write_stacks, directory, str(error).partition("\n")[0])
    except (OSError, TimeoutError) as problem:
        note(f"the stacks of the processes were not written ({type(problem).__name__}: {problem})")
    else:
        note(f"the stacks of this machine's processes are in {file}")
