"""A rollout's sandbox in a container of Podman or Docker on this machine.

    create (limits, no network, no capabilities) --> each program: start, exec, stop --> rm

The container is stopped between programs, which kills leftover processes; its files persist.
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

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.engines import MAX_QUOTED, OWNER, ContainerEngine, owner
from slimx.extras.boxes.programs import memory_group, seccomp
from slimx.extras.boxes.programs.enclosure import MIB, NOBODY, ProgramResult
from slimx.extras.boxes.programs.watch import Ended, Limits, SandboxWatch
from slimx.extras.boxes.protocol import Box, BoxLost, BoxRefusal, Either, check_run, names_of, not_plain, too_large
from slimx.runtime.logs import how_ended

EXTRA_PROCESSES = 16
"""Number of processes and threads that a container may have in addition to the program's: its initial process, and
those of the runtime while it starts the program."""
NPROC = 16_384
"""Maximum number of processes per user across all sandboxes; applies only if this process cannot raise limits."""
STOP_TRIES = 3
"""Number of attempts to stop a container. One may not be enough: on a busy machine, podman gives up before the kernel
has killed all processes."""
COPY_SECONDS = 60.0
"""Time limit in seconds for a program that writes or reads one file."""
_LAYER = "{{with .GraphDriver}}{{with .Data}}{{with .UpperDir}}{{.}}{{end}}{{end}}{{end}}"
"""Template with which the engine's `inspect` prints the directory of the container's upper layer, or nothing if the
storage driver has none."""
NO_FILE = 100
"""Exit status of the scripts below if the path contains a link or names something other than a regular file."""
_WALK = f"""
at= ; IFS=/ ; set -f
for name in ${{1#/}}; do at=$at/$name; [ ! -L "$at" ] || exit {NO_FILE}; done
"""
_PUT = f"""{_WALK}
[ ! -e "$1" ] || [ -f "$1" ] || exit {NO_FILE}
mkdir -p -- "${{1%/*}}/" && cat > "$1" || exit {NO_FILE}
"""
_GET = f"""{_WALK}
[ -f "$1" ] && cat -- "$1" || exit {NO_FILE}
"""


class ContainerBox(Box):
    """`Box` in a container, which starts from an image, or from a copy of a tar archive or directory on this machine.

    The image needs `sleep` and, for `put` and `get`, `sh`, `mkdir` and `cat`. `Limits.disk_mib` bounds the disk space
    that programs use in addition to the image.
    """

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
        """Creates the container.

        `source`: name of an image that the engine has, or a path. `host_usr`: True to mount this machine's /usr.
        `user`: UID:GID of programs; None for the image's user, or 65534 if the source is a path. `cpus`: maximum number
        of processors. `base`: parent directory of temporary roots. `image_mib`: maximum size in MiB of a source that is
        a path; snapshots may be larger by `Limits.disk_mib`. Raises BoxRefusal for an image that is missing or declares
        volumes, BoxLost if the engine fails.
        """
        super().__init__(limits)
        self._engine = engine
        self._largest = (image_mib + self.limits.disk_mib) * MIB
        self._imported = ""
        """Id of the image that was imported from a path, to be removed by `_end`; "" if there is none."""
        self._name = ""
        """Id of the container; "" before it is created and after it is removed."""
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
            with contextlib.suppress(BoxLost):  # the first error explains the failure
                self.end()
            raise

    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> ProgramResult:
        """Runs a program, as `Box.run` describes. The status is 126 or 127 if the program or `cwd` is missing."""
        check_run(command, stdin, cwd)
        with self._living():
            return self._run(command, stdin.encode(), cwd, stop, self.limits)[0]

    def put(self, path: str, content: bytes) -> None:
        names_of(path)
        with self._living():
            ran, _ = self._run(["sh", "-c", _PUT, "put", path], content, "/", None, self._for_copies(0))
        if not ran.ok:
            raise not_plain(path, ran.stderr.strip()[-MAX_QUOTED:] or ran.ending)

    def get(self, path: str, most: int) -> bytes:
        names_of(path)
        with self._living():
            ran, content = self._run(["sh", "-c", _GET, "get", path], b"", "/", None, self._for_copies(most))
        if ran.ended == "output" or len(content) > most:
            raise too_large(path, f"more than {most}", most)
        if not ran.ok:
            raise not_plain(path, ran.stderr.strip()[-MAX_QUOTED:] or ran.ending)
        return content

    def snapshot(self, to: Path) -> None:
        with self._living(), rootfs.unpacked(to) as archive:
            # The limit also counts holes of sparse files, which engines export as zeros.
            if not self._engine.save("export", self._name, to=archive, most=self._largest, seconds=rootfs.COPY_S):
                raise rootfs.too_large(archive, self._largest)

    def _end(self) -> None:
        name = self._name
        self._name = ""
        imported = self._imported
        self._imported = ""
        try:
            if name:
                self._engine.call("rm", "--force", "--volumes", name)
        finally:
            if imported:
                self._engine.call("rmi", "--force", imported)

    def _created(self, image: str, host_usr: bool, user: str | None, cpus: float, profile: str) -> list[str]:
        """Returns the arguments of the engine command that creates the container.

        `profile`: path of the seccomp profile.
        """
        limits = self.limits
        bounds = {"nofile": 256, "core": 0, "fsize": limits.disk_mib * MIB}
        if not _may_raise_limits():
            # podman's default exceeds what it may set without the capability; --pids-limit bounds the sandbox itself.
            bounds["nproc"] = min(NPROC, resource.getrlimit(resource.RLIMIT_NPROC)[1])
        words = ["create", "--name", f"{rootfs.PREFIX}{uuid.uuid4().hex}", "--label", f"{OWNER}={owner()}"]
        words += ["--pull", "never", "--no-healthcheck", "--hostname", "box", "--network", "none"]
        words += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
        # podman's default profile allows new namespaces, in which a program would have all capabilities.
        words += ["--security-opt", f"seccomp={profile}"]
        # The limit of memory plus swap equals that of memory, which excludes swap.
        words += ["--memory", f"{limits.memory_mib}m", "--memory-swap", f"{limits.memory_mib}m"]
        words += ["--pids-limit", str(limits.processes + EXTRA_PROCESSES), "--cpus", f"{cpus:g}", "--shm-size", "1m"]
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
                f"the image {image} declares volumes, which the disk limit of a sandbox does not cover; build the "
                "image without VOLUME instructions",
                code="volume",
                about=image,
            )

    def _import(self, source: Path, base: Path | None, image_mib: int, host_usr: bool) -> str:
        """Creates an image from an archive or a directory, checked like the root of a sandbox, and returns the image's
        id."""
        root = rootfs.make(source, base, image_mib, host_usr=host_usr)
        try:
            with tempfile.TemporaryFile() as archive:
                with tarfile.open(fileobj=archive, mode="w") as written:
                    written.add(root.path, ".")
                archive.seek(0)
                words = ("import", "--change", f"LABEL {OWNER}={owner()}", "-")
                return self._engine.call(*words, stdin=archive, seconds=rootfs.COPY_S).splitlines()[-1]
        finally:
            root.remove()

    def _run(
        self, command: Sequence[str], stdin: bytes, cwd: str, stop: threading.Event | None, limits: Limits
    ) -> tuple[ProgramResult, bytes]:
        """Starts the container, runs a program in it, and stops it. Returns the result and the raw standard output."""
        name = self._name
        try:
            self._engine.call("start", name)
            pid = int(self._engine.call("inspect", "--format", "{{.State.Pid}}", name))
            group = memory_group.of_process(pid)
            words = [*self._engine.words, "exec", "--interactive", "--workdir", cwd, name, *command]
            started = time.monotonic()
            most = self._began_with + self.limits.disk_mib * MIB
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            try:
                watch = SandboxWatch(
                    process,
                    limits,
                    started,
                    group=group,
                    stop=Either(self._closing, stop),
                    disk_used=lambda _: self._used(group, most) - self._began_with,
                )
                ended = watch.until_the_end(stdin)
                seconds = time.monotonic() - started
                if ended == "exit":
                    ended = self._really_ended(name, process.returncode)
            finally:
                # Kills the client first, because a program that is blocked on its output would not stop.
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
        output = bytes(watch.read["stdout"])
        error = watch.read["stderr"].decode(errors="replace")
        status = process.returncode if ended == "exit" else None
        return ProgramResult(output.decode(errors="replace"), error, ended, status, seconds), output

    def _really_ended(self, name: str, status: int) -> Ended:
        """Returns the reason why a program ended, once the engine's client has exited with `status`.

        Raises BoxLost if the engine failed instead. The statuses 125, 137 and 255 may come from the engine or from the
        program, so the container is inspected: if it is still running, they come from the program.
        """
        if status not in (125, 137, 255):
            return "exit"
        running, killed = self._engine.call(
            "inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}", name
        ).split()
        if killed == "true":
            return "memory"
        if running != "true":
            raise BoxLost(
                f"the container {name[:12]} stopped, and the program in it {how_ended(status)}; find the cause in the "
                "log of the container engine",
                about=name,
            )
        return "exit"

    def _stop(self, name: str) -> None:
        for _ in range(STOP_TRIES - 1):
            if self._engine.ask("stop", "--time", "0", name).returncode == 0:
                return
        self._engine.call("stop", "--time", "0", name)

    def _used(self, group: memory_group.MemoryGroup | None, most: float = math.inf) -> int:
        """Returns the number of bytes that the container has added to its image, including deleted files that are still
        open.

        `group`: memory group whose processes may have deleted files open. Stops counting once the number exceeds
        `most`.
        """
        deleted = 0
        if group is not None:
            deleted = rootfs.deleted(group.members())
        if os.path.isdir(self._layer):
            return rootfs.used(Path(self._layer), most=most) + deleted
        words = ("container", "inspect", "--size", "--format", "{{.SizeRw}}")
        return int(self._engine.call(*words, self._name)) + deleted

    def _for_copies(self, most: int) -> Limits:
        """Returns the limits of a program that copies one file of up to `most` bytes."""
        return dataclasses.replace(self.limits, seconds=COPY_SECONDS, output_kib=most // 1024 + 1)


def _may_raise_limits() -> bool:
    """Returns True if this process has CAP_SYS_RESOURCE, and may therefore raise resource limits."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["CapEff"], 16) >> 24 & 1)
