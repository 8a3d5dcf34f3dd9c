"""Runs Python code that a model wrote, isolated from the machine and the run.

    slimx --> unshare (a new user namespace, where processes are counted) --> prlimit --> bubblewrap --> python

bubblewrap (Debian package `bubblewrap`) puts the code into new user, process, network, mount and host name namespaces,
without capabilities, with /usr read-only and a small writable /tmp. A filter denies system calls that could break out
(`seccomp`), resource limits bound each process, and if the machine supports it a memory control group bounds all of
them together (`memory_group`). If slimx runs as root, the code runs as an unprivileged user, because process limits do
not apply to root. The exit status is read from bubblewrap, over a descriptor that the code does not have.
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
from slimx.extras.boxes.programs.enclosure import EXTRA_PROCESSES, MIB, Enclosure, ProgramResult, descriptor, in_thread
from slimx.extras.boxes.programs.watch import Limits

TRIAL_S = 60.0
"""Seconds that the trial in `check` may take in addition to a program's limit, because a busy machine starts it
slowly."""


class Sandbox:
    """Sandbox for Python code: runs any number of programs concurrently, from any thread, each under `limits`, by
    default `Limits()`."""

    def __init__(self, limits: Limits | None = None):
        """Locates the programs that the sandbox needs. Raises SlimxError if one is not installed."""
        self.limits = limits or Limits()
        self._enclosure = Enclosure(self.limits, "python3")

    async def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> ProgramResult:
        """Runs `code` in a sandbox thread, as `run_blocking` describes. Cancelling this call stops the code."""
        return await in_thread(lambda stop: self.run_blocking(code, stdin=stdin, files=files, stop=stop))

    def run_blocking(
        self,
        code: str,
        *,
        stdin: str | int = "",
        stdout: int | None = None,
        files: Mapping[str, str] | None = None,
        stop: threading.Event | None = None,
    ) -> ProgramResult:
        """Runs `code` as a program and returns its result.

        `stdin`: input of the program, as text or as a descriptor. `stdout`: descriptor for its output, instead of
        `ProgramResult.stdout`. `files`: contents, by name, of read-only files that are placed next to the program in
        /code, so that it can import them. `stop`: event that kills the program when set.

        Raises SlimxError if the sandbox itself cannot start.
        """
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
        """Description of the limit on the memory of all processes of a program together."""
        hierarchy = self._enclosure.hierarchy
        if hierarchy is not None:
            return f"a control group (version {hierarchy.version}) limits all processes to memory_mib + disk_mib"
        return "memory_mib limits the address space of each process, and the resident memory of all processes together"

    def check(self) -> None:
        """Runs a program that tries to break out of the sandbox. Raises SlimxError naming the isolation guarantees that
        do not hold on this machine."""
        patient = type(self)(replace(self.limits, seconds=self.limits.seconds + TRIAL_S))
        outside = {
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sandbox_probe.NAMESPACES},
            "processes": self.limits.processes + EXTRA_PROCESSES,
            "memory": self.limits.memory_mib * MIB,
        }
        result = patient.run_blocking(sandbox_probe.source(), stdin=json.dumps(outside))
        if not result.ok:
            raise SlimxError(
                f"the program that tests the sandbox {result.ending} ({result.stderr.strip()[-300:]}); resolve this "
                "error, or remove from the configuration the hooks that run code",
                code="sandbox.probe",
                about=result.ended,
            )
        missing = [promise for promise, fulfilled in json.loads(result.stdout).items() if not fulfilled]
        if missing:
            raise SlimxError(
                f"the sandbox cannot give all its guarantees on this machine (missing: {'; '.join(missing)}); allow "
                "user namespaces in the sysctl user.max_user_namespaces and the container's seccomp profile, or remove "
                "from the configuration the hooks that run code",
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
    """Returns bubblewrap's options for read-only access to this machine's programs."""
    words = ["--ro-bind", "/usr", "/usr"]
    for directory in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{directory}"):
            words += ["--symlink", f"usr/{directory}", f"/{directory}"]
        elif os.path.isdir(f"/{directory}"):
            words += ["--ro-bind", f"/{directory}", f"/{directory}"]
    return words


@contextlib.contextmanager
def _files(contents: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """Yields descriptors of in-memory files with `contents`, by name."""
    with contextlib.ExitStack() as resources:
        named: dict[str, int] = {}
        for name, content in contents.items():
            if "/" in name or name.startswith("."):
                raise SlimxError(
                    f"the sandbox file name {name!r} contains `/` or starts with `.`; use a plain file name",
                )
            named[name] = resources.enter_context(descriptor(content.encode()))
        yield named
