"""Runs Python that a model wrote, so that it can harm neither the machine nor the run.

    slimx --> unshare (a user namespace of its own, where processes are counted) --> prlimit --> bubblewrap --> python

bubblewrap (Debian: `bubblewrap`) gives the code its own user, process, network, mount and host name spaces, no
capabilities, and nothing but /usr to read and a small /tmp to write. A filter denies the system calls that would lead
out of that (`seccomp`), resource limits bound each process, and where the machine allows it a memory control group
bounds all of them together (`memory_group`). As root the code runs as nobody: limits on the number of processes do not
bind root. How the code ended is read from bubblewrap, over a descriptor that the code does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

from slimx.errors import SlimxError
from slimx.extras.boxes.programs import probe as sandbox_probe
from slimx.extras.boxes.programs.enclosure import MIB, OWN_PROCESSES, Enclosure, Ran, descriptor, in_thread
from slimx.extras.boxes.programs.watch import Limits

TRIAL_S = 60.0
"""Seconds that the trial may take besides the limit of a program, as a busy machine is slow to start it."""


class Sandbox:
    """Runs code under `limits`, those of `Limits()` unless given. Any number of runs at once, from any thread."""

    def __init__(self, limits: Limits | None = None):
        """Raises SlimxError for a program that is missing."""
        self.limits = limits or Limits()
        self._enclosure = Enclosure(self.limits, "python3")

    async def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """Run `code` as `run_blocking` does, in a thread of the sandbox's own. Cancelling the call ends the code."""
        return await in_thread(lambda stop: self.run_blocking(code, stdin=stdin, files=files, stop=stop))

    def run_blocking(
        self,
        code: str,
        *,
        stdin: str | int = "",
        stdout: int | None = None,
        files: Mapping[str, str] | None = None,
        stop: threading.Event | None = None,
    ) -> Ran:
        """Run `code` as a program. `stdin`: what it reads, or a descriptor that it reads from. `stdout`: a descriptor
        that it writes to, instead of `Ran.stdout`. `files`: contents by name, read-only beside it in /code, where it is
        imported from. It is killed once `stop` is set.

        Raises SlimxError if the sandbox itself cannot start."""
        with _files({**(files or {}), "main.py": code}) as named:
            return self._enclosure.run(
                self._enclosed(named),
                [self._enclosure.paths["python3"], "-s", "/code/main.py"],
                group_mib=self.limits.memory_mib + self.limits.disk_mib,
                passed=list(named.values()),
                stdin=stdin,
                stdout=stdout,
                stop=stop,
            )

    @property
    def memory_bound(self) -> str:
        """The bound that holds for the memory of all processes of a run together."""
        if self._enclosure.place is not None:
            return (
                f"a control group (version {self._enclosure.place.version}) holds everything to memory_mib + disk_mib"
            )
        return "each process is held to memory_mib of address space, all together to what they have resident"

    def check(self) -> None:
        """Try to break out, once. Raises SlimxError naming the guarantees that this machine does not give."""
        patient = type(self)(replace(self.limits, seconds=self.limits.seconds + TRIAL_S))
        outside = {
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sandbox_probe.NAMESPACES},
            "processes": self.limits.processes + OWN_PROCESSES,
            "memory": self.limits.memory_mib * MIB,
        }
        ran = patient.run_blocking(sandbox_probe.source(), stdin=json.dumps(outside))
        if not ran.ok:
            raise SlimxError(
                f"the sandbox could not be tried (the trial {ran.ending}): {ran.stderr.strip()[-300:]}",
                code="sandbox.probe",
                about=ran.ended,
            )
        missing = [promise for promise, kept in json.loads(ran.stdout).items() if not kept]
        if missing:
            raise SlimxError(
                f"the sandbox does not hold on this machine: {'; '.join(missing)}; allow user namespaces "
                "(sysctl user.max_user_namespaces, or the container's seccomp profile) or leave out what runs code",
                code="sandbox.promise",
                about=missing[0],
            )

    def _enclosed(self, named: Mapping[str, int]) -> list[str]:
        words = [*host_programs(), "--proc", "/proc", "--dev", "/dev", "--size", str(MIB), "--tmpfs", "/dev/shm"]
        words += ["--size", str(self.limits.disk_mib * MIB), "--tmpfs", "/tmp"]
        for name, file in named.items():
            words += ["--ro-bind-data", str(file), f"/code/{name}"]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
        for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}.items():
            words += ["--setenv", name, value]
        return words


def host_programs() -> list[str]:
    """bubblewrap's words for the programs of this machine, to read."""
    words = ["--ro-bind", "/usr", "/usr"]
    for directory in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{directory}"):
            words += ["--symlink", f"usr/{directory}", f"/{directory}"]
        elif os.path.isdir(f"/{directory}"):
            words += ["--ro-bind", f"/{directory}", f"/{directory}"]
    return words


@contextlib.contextmanager
def _files(contents: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """Descriptors by name of files in memory."""
    with contextlib.ExitStack() as open_now:
        named: dict[str, int] = {}
        for name, content in contents.items():
            if "/" in name or name.startswith("."):
                raise SlimxError(
                    f"the sandbox puts files beside the code, and {name!r} is no plain name",
                )
            named[name] = open_now.enter_context(descriptor(content.encode()))
        yield named
