"""A box in a container of Podman or Docker, on this machine.

    create (limits, no network, no capabilities) --> each program: start, exec, stop --> rm

The container is stopped between programs, which ends all that a program has left behind; its files stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import resource
import subprocess
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from slimx.extras.boxes import roots
from slimx.extras.boxes.engines import MAX_SAID, OWNER, ContainerEngine, owner
from slimx.extras.boxes.programs import memory_group, seccomp
from slimx.extras.boxes.programs.enclosure import MIB, NOBODY, Ran
from slimx.extras.boxes.programs.watch import Ended, Limits, SandboxWatch
from slimx.extras.boxes.protocol import Box, BoxLost, BoxRefusal, Either, check_run, names_of, not_plain, too_large
from slimx.runtime.logs import how_ended

OWN_PROCESSES = 16
"""Processes and threads in the container besides the program and its own: its first one, and the runtime's while it
starts the program."""
NPROC = 16_384
"""Processes that a user may have, all boxes together, where this process cannot raise limits."""
STOP_TRIES = 3
"""On a busy machine podman gives up before the kernel has ended all processes."""
COPY_SECONDS = 60.0
"""For a program that writes or reads one file."""
_LAYER = "{{with .GraphDriver}}{{with .Data}}{{with .UpperDir}}{{.}}{{end}}{{end}}{{end}}"
"""The directory of what a container adds, where the storage driver has one."""
NO_FILE = 100
"""Exit status of the programs below for what is no plain file reached without links."""
_WALK = f"""
way= ; IFS=/ ; set -f
for name in ${{1#/}}; do way=$way/$name; [ ! -L "$way" ] || exit {NO_FILE}; done
"""
_PUT = f"""{_WALK}
[ ! -e "$1" ] || [ -f "$1" ] || exit {NO_FILE}
mkdir -p -- "${{1%/*}}/" && cat > "$1" || exit {NO_FILE}
"""
_GET = f"""{_WALK}
[ -f "$1" ] && cat -- "$1" || exit {NO_FILE}
"""


class ContainerBox(Box):
    """A `Box` that begins as an image, or as a copy of a tar archive or directory of this machine.

    The image needs `sleep` and, for `put` and `get`, `sh`, `mkdir` and `cat`. `Limits.disk_mib` bounds what it adds."""

    def __init__(
        self,
        source: str | Path,
        limits: Limits | None = None,
        *,
        engine: ContainerEngine,
        host_usr: bool = False,
        user: str | None = None,
        cpus: float = 1.0,
        base: Path | None = None,
        image_mib: int = 4096,
    ):
        """`source`: name of an image that the engine has, or a path. `host_usr`: the box reads this machine's /usr.
        `image_mib`: size of a path at most, and with `Limits.disk_mib` that of a snapshot. `user`: of its programs, as
        UID:GID; None: the image's, or 65534 where it began as a path. Raises BoxRefusal for an image that is not
        there or has volumes, BoxLost if the engine fails."""
        super().__init__(limits)
        self._engine = engine
        self._largest = (image_mib + self.limits.disk_mib) * MIB
        self._imported: str | None = None
        self._name: str | None = None
        if isinstance(source, Path):
            user = user or f"{NOBODY}:{NOBODY}"
            self._imported = self._import(source, base, image_mib, host_usr)
        image = self._imported or str(source)
        try:
            self._check(image)
            with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
                json.dump(seccomp.profile(), profile)
                profile.flush()
                words = self._created(image, host_usr, user, cpus, profile.name)
                self._name = self._engine.call(*words).splitlines()[-1]
            self._layer = self._engine.call("inspect", "--format", _LAYER, self._name)
            self._began_with = self._used(None)
        except BaseException:
            with contextlib.suppress(BoxLost):  # the first error says more
                self.end()
            raise

    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> Ran:
        """Run a program, as `Box.run` says. The status is 126 or 127 where the box lacks the program or `cwd`."""
        check_run(command, stdin, cwd)
        with self._living():
            return self._run(command, stdin.encode(), cwd, stop, self.limits)[0]

    def put(self, path: str, content: bytes) -> None:
        names_of(path)
        with self._living():
            ran, _ = self._run(["sh", "-c", _PUT, "put", path], content, "/", None, self._for_copies(0))
        if not ran.ok:
            raise not_plain(path, ran.stderr.strip()[-MAX_SAID:] or ran.ending)

    def get(self, path: str, most: int) -> bytes:
        names_of(path)
        with self._living():
            ran, content = self._run(["sh", "-c", _GET, "get", path], b"", "/", None, self._for_copies(most))
        if ran.ended == "output" or len(content) > most:
            raise too_large(path, f"more than {most}", most)
        if not ran.ok:
            raise not_plain(path, ran.stderr.strip()[-MAX_SAID:] or ran.ending)
        return content

    def snapshot(self, to: Path) -> None:
        with self._living(), roots.unpacked(to) as archive:
            # Engines write holes of sparse files out.
            if not self._engine.save("export", self._name, to=archive, most=self._largest, seconds=roots.COPY_S):
                raise roots.too_large(archive, self._largest)

    def _end(self) -> None:
        name, self._name = self._name, None
        imported, self._imported = self._imported, None
        try:
            if name is not None:
                self._engine.call("rm", "--force", "--volumes", name)
        finally:
            if imported is not None:
                self._engine.call("rmi", "--force", imported)

    def _created(self, image: str, host_usr: bool, user: str | None, cpus: float, profile: str) -> list[str]:
        """The command that makes the container."""
        limits = self.limits
        bounds = {"nofile": 256, "core": 0, "fsize": limits.disk_mib * MIB}
        if not _may_raise_limits():
            # podman would ask for more than it can give here; what bounds a box is --pids-limit.
            bounds["nproc"] = min(NPROC, resource.getrlimit(resource.RLIMIT_NPROC)[1])
        words = ["create", "--name", f"{roots.PREFIX}{uuid.uuid4().hex}", "--label", f"{OWNER}={owner()}"]
        words += ["--pull", "never", "--no-healthcheck", "--hostname", "box", "--network", "none"]
        words += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
        # podman's own profile lets name spaces be made inside, in which a program has all powers.
        words += ["--security-opt", f"seccomp={profile}"]
        # No swap: memory and swap together are what memory alone may be.
        words += ["--memory", f"{limits.memory_mib}m", "--memory-swap", f"{limits.memory_mib}m"]
        words += ["--pids-limit", str(limits.processes + OWN_PROCESSES), "--cpus", f"{cpus:g}", "--shm-size", "1m"]
        for name, most in bounds.items():
            words += ["--ulimit", f"{name}={most}:{most}"]
        if user is not None:
            words += ["--user", user]
        if host_usr:
            words += ["--volume", "/usr:/usr:ro"]
        return [*words, "--entrypoint", "sleep", image, "infinity"]

    def _check(self, image: str) -> None:
        if not self._engine.has_image(image):
            raise self._engine.no_image(image)
        if self._engine.call("image", "inspect", "--format", "{{len .Config.Volumes}}", image) != "0":
            raise BoxRefusal(
                f"the image {image} declares volumes, whose bytes no limit of a box counts; make one without VOLUME",
                code="volume",
                about=image,
            )

    def _import(self, source: Path, base: Path | None, image_mib: int, host_usr: bool) -> str:
        """The image made of an archive or a directory, which passes the checks of all roots on the way."""
        root = roots.make(source, base, image_mib, host_usr=host_usr)
        try:
            with tempfile.TemporaryFile() as archive:
                with tarfile.open(fileobj=archive, mode="w") as written:
                    written.add(root.path, ".")
                archive.seek(0)
                words = ("import", "--change", f"LABEL {OWNER}={owner()}", "-")
                return self._engine.call(*words, stdin=archive, seconds=roots.COPY_S).splitlines()[-1]
        finally:
            root.remove()

    def _run(
        self, command: Sequence[str], stdin: bytes, cwd: str, stop: threading.Event | None, limits: Limits
    ) -> tuple[Ran, bytes]:
        """Run a program between start and stop of the container; the second is its standard output as it was."""
        name = self._name
        try:
            self._engine.call("start", name)
            pid = int(self._engine.call("inspect", "--format", "{{.State.Pid}}", name))
            group = memory_group.of_process(pid)
            words = [*self._engine.words, "exec", "--interactive", "--workdir", cwd, name, *command]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            began = time.monotonic()
            most = self._began_with + self.limits.disk_mib * MIB
            process = subprocess.Popen(words, **pipes)
            try:
                watch = SandboxWatch(
                    process, limits, began, None, group, None, Either(self._given_up, stop),
                    lambda _: self._used(group, most) - self._began_with,
                )  # fmt: skip
                ended = watch.until_the_end(stdin)
                seconds = time.monotonic() - began
                if ended == "exit":
                    ended = self._really_ended(name, process.returncode)
            finally:
                # The client first: what waits for it to read would not end.
                process.kill()
                process.wait()
                self._stop(name)
                for stream in (process.stdin, process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
        except BaseException:
            with contextlib.suppress(BoxLost):
                self._stop(name)
            raise
        output, error = bytes(watch.read["stdout"]), watch.read["stderr"].decode(errors="replace")
        status = process.returncode if ended == "exit" else None
        return Ran(output.decode(errors="replace"), error, ended, status, seconds), output

    def _really_ended(self, name: str, status: int) -> Ended:
        """Say how a program ended whose client ended by itself. Raises BoxLost where it was the engine that failed.

        Status 125 is the engine's own or the program's: it is the program's if the container still runs, as it is
        asked after any end that a signal or the engine may have caused."""
        if status not in (125, 137, 255):
            return "exit"
        running, killed = self._engine.call(
            "inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}", name
        ).split()
        if killed == "true":
            return "memory"
        if running != "true":
            raise BoxLost(f"the container {name[:12]} has ended under a program, which {how_ended(status)}", about=name)
        return "exit"

    def _stop(self, name: str) -> None:
        for _ in range(STOP_TRIES - 1):
            if self._engine.ask("stop", "--time", "0", name).returncode == 0:
                return
        self._engine.call("stop", "--time", "0", name)

    def _used(self, group: memory_group.MemoryGroup | None, most: float = math.inf) -> int:
        """Returns the bytes that the container has added to its image, with deleted files that are still open;
        counting stops above `most`."""
        open_ones = roots.deleted(group.members()) if group is not None else 0
        if os.path.isdir(self._layer):
            return roots.used(Path(self._layer), most=most) + open_ones
        words = ("container", "inspect", "--size", "--format", "{{.SizeRw}}")
        return int(self._engine.call(*words, self._name)) + open_ones

    def _for_copies(self, most: int) -> Limits:
        """Limits of a program that copies one file of up to `most` bytes."""
        return dataclasses.replace(self.limits, seconds=COPY_SECONDS, output_kib=most // 1024 + 1)


def _may_raise_limits() -> bool:
    """True if this process has CAP_SYS_RESOURCE."""
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(held.split()[1], 16) >> 24 & 1)
