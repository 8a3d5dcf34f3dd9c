"""A rollout's sandbox on this machine: a root directory in bubblewrap's namespaces, with limits and a system call
filter."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.programs.enclosure import MIB, NOBODY, Enclosure, NotStarted, ProgramResult
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxRefusal, Either, check_run, names_of, not_plain, too_large

NOT_FOUND = 127
"""Exit status with which a shell reports that a program was not found."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class BubblewrapBox(Box):
    """`Box` in bubblewrap's namespaces, whose root starts as a copy of `source`, a tar archive or a directory.

    `Limits.disk_mib` bounds what programs add to the root. /dev, /proc and, with `host_usr`, /usr are mounted and not
    part of the root.
    """

    def __init__(
        self,
        source: Path,
        limits: Limits | None = None,
        *,
        host_usr: bool = False,
        base: Path | None = None,
        image_mib: int = 4096,
    ):
        """Creates the root directory.

        `host_usr`: True to mount this machine's /usr, for roots without programs. `base`: parent directory of the root;
        None for the temporary directory. `image_mib`: maximum size of the initial root in MiB. Raises SlimxError if a
        program that the sandbox needs is not installed, BoxRefusal for an unusable source.
        """
        super().__init__(limits)
        self._enclosure = Enclosure(self.limits)
        self._host_usr = host_usr
        self._removed = False
        self._root = rootfs.make(source, base, image_mib, host_usr=host_usr)
        self._began_with = rootfs.used(self._root.path)

    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> ProgramResult:
        """Runs a program, as `Box.run` describes.

        `ended` is "disk" if the sandbox exceeds its disk limit. The status is 127 if the program or `cwd` is missing.
        """
        check_run(command, stdin, cwd)
        with self._living():
            root = self._root.path
            most = self._began_with + self.limits.disk_mib * MIB
            words = ["--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
            words += ["--size", str(MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
            if self._host_usr:
                words += ["--ro-bind", "/usr", "/usr"]
            words += ["--chdir", cwd, "--clearenv"]
            for name, value in {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8"}.items():
                words += ["--setenv", name, value]
            mounts = ["proc", "dev"]
            if self._host_usr:
                mounts.append("usr")
            for name in mounts:
                self._mount_point(root, name)
            try:
                return self._enclosure.run(
                    words,
                    command,
                    group_mib=self.limits.memory_mib + self.limits.disk_mib,
                    stdin=stdin,
                    stop=Either(self._closing, stop),
                    disk_used=lambda outermost: rootfs.used(root, outermost, most=most) - self._began_with,
                )
            except NotStarted as error:
                if not error.message.startswith(("bwrap: execvp ", "bwrap: Can't chdir to ")):
                    raise
                return ProgramResult("", error.message, "exit", NOT_FOUND, 0.0)

    def put(self, path: str, content: bytes) -> None:
        with self._living(), self._above(path, make=True) as (directory, name):
            try:
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=directory)
            except OSError as error:
                raise _not_plain(path, error) from None
            with os.fdopen(file, "wb") as opened:
                _plain(path, file)
                os.truncate(file, 0)
                opened.write(content)
                self._chown(file)

    def get(self, path: str, most: int) -> bytes:
        with self._living(), self._above(path, make=False) as (directory, name):
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            except OSError as error:
                raise _not_plain(path, error) from None
            with os.fdopen(file, "rb") as opened:
                size = _plain(path, file)
                if size > most:
                    raise too_large(path, str(size), most)
                return opened.read(most)

    def snapshot(self, to: Path) -> None:
        with self._living():
            rootfs.copy(self._root.path, to)

    def _end(self) -> None:
        if not self._removed:
            self._removed = True
            self._root.remove()

    def _mount_point(self, root: Path, name: str) -> None:
        """Ensures that the mount point `name` is a directory.

        Removes anything else that a program put there, such as a link that would redirect bubblewrap's mount.
        """
        os.chmod(root, 0o755)
        point = root / name
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(point.lstat().st_mode):
                return
            point.unlink()
        point.mkdir()
        os.chmod(point, 0o755)

    @contextlib.contextmanager
    def _above(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Yields a descriptor of the parent directory of `path`, opened without following links, and the last component
        of `path`.

        `make`: True to create missing directories.
        """
        *names, last = names_of(path)
        directory = os.open(self._root.path, _DIRECTORY)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=directory)
                        made = os.open(name, _DIRECTORY, dir_fd=directory)
                        self._chown(made)
                        os.close(made)
                below = os.open(name, _DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = below
            yield directory, last
        except OSError as error:
            raise _not_plain(path, error) from None
        finally:
            os.close(directory)

    def _chown(self, descriptor: int) -> None:
        if os.geteuid() == 0:
            os.fchown(descriptor, NOBODY, NOBODY)


def _plain(path: str, descriptor: int) -> int:
    """Returns the size of an open file. Raises BoxRefusal, naming `path`, if it is not a regular file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _not_plain(path, None)
    return status.st_size


def _not_plain(path: str, error: OSError | None) -> BoxRefusal:
    return not_plain(path, str(error.strerror) if error is not None else "not a regular file")
