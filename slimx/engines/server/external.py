"""A server that slimx did not start: it is asked what it is, used, and left as it was found."""

from __future__ import annotations

import contextlib
from pathlib import Path

from slimx.engines.server.arguments import command_line
from slimx.engines.server.control import EngineControl
from slimx.engines.server.spec import EngineSpec, policy_args
from slimx.errors import SlimxError

LEAVE_S = 5.0
"""Seconds for each of the calls by which a server is taken over or left."""


class ForeignProcess:
    """Stand-in for the process of such a server (`slimx.runtime.process.SupervisedProcess`): nothing here starts or
    ends it, and its output is elsewhere."""

    pid = None

    def __init__(self, url: str):
        self.log_path = Path("the log of whoever started it")
        self.url = url

    def start(self) -> None: ...

    def poll(self) -> int | None:
        """None: it is not known to have ended. Whether it takes connections is asked elsewhere."""
        return None

    def tail(self, lines: int = 20) -> str:
        return ""

    def stop(self, grace_s: float = 10.0) -> None: ...


async def check_arguments(control: EngineControl, spec: EngineSpec) -> None:
    """Refuse a server of the policy that was started without what slimx needs of it."""
    info = await control.server_info()
    needed = policy_args(spec)
    for name, value in needed.items():
        if value and info.get(name) != value:
            flags = " ".join(command_line(needed))
            raise SlimxError(
                f"engine {spec.name} at {spec.url} runs with {name}={info.get(name)!r}, slimx needs {value!r}; "
                f"start it with python -m slimx.engines.server.launch -- ... {flags}",
                code="external.argument",
                about=name,
            )
    if (role := info.get("disaggregation_mode", "null")) != ("null" if spec.role == "regular" else spec.role):
        raise SlimxError(
            f"engine {spec.name} at {spec.url} runs with disaggregation_mode={role!r}, and its group has the role "
            f"{spec.role}; change one of them",
            code="external.role",
            about=spec.url,
        )


async def close_open(control: EngineControl, *, paused: bool) -> None:
    """End the publication that is open there and, if it is `paused` with whole weights, have the server generate: what
    an earlier run left is ended before it is used, and what is ours when it is left. It need not answer."""
    with contextlib.suppress(SlimxError):
        await control.ask("slimx.abort", deadline_s=LEAVE_S)
    if paused:
        with contextlib.suppress(SlimxError):
            await control.resume(LEAVE_S)
