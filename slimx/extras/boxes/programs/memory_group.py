"""A memory control group for one run in the sandbox: everything that its processes keep in memory counts, also what no
process has mapped (files in memory, shared segments, buffers of the kernel).

    Hierarchy: where this process may make groups  -- make -->  MemoryGroup: limit, processes, did it overflow, remove

Control groups of version 1 are made below this process's own, where it may write there (root). Of version 2: below or
beside its own, where that part of the tree hands the memory controller on and is delegated to this user (a systemd
user session, a unit with Delegate=yes). Nothing is moved and no group is configured but those made here, so that
limits set on this process stay in force for what it runs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

PREFIX = "slimx-sandbox-"
REMOVE_S = 2.0
"""Seconds to wait for a group to empty whose last process is on its way out."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory in which groups can be made."""

    directory: Path
    version: int

    def make(self, limit: int) -> MemoryGroup:
        """A new group that may hold `limit` bytes. Raises OSError."""
        directory = self.directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        directory.mkdir()
        group = MemoryGroup(directory, self.version)
        try:
            group.limit(limit)
        except OSError:
            group.remove()
            raise
        return group


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    directory: Path
    version: int

    def limit(self, size: int) -> None:
        if self.version == 1:
            (self.directory / "memory.limit_in_bytes").write_text(str(size))
            with contextlib.suppress(OSError):  # where swap is not accounted, or there is none
                (self.directory / "memory.memsw.limit_in_bytes").write_text(str(size))
        else:
            (self.directory / "memory.max").write_text(str(size))
            with contextlib.suppress(OSError):
                (self.directory / "memory.swap.max").write_text("0")

    def take(self, pid: int) -> None:
        """Move a process here; what it starts from then on is here too."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def overflowed(self) -> bool:
        """True once the kernel has killed a process here because the limit was reached."""
        events = "memory.oom_control" if self.version == 1 else "memory.events"
        counts = dict(line.split() for line in (self.directory / events).read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0

    def members(self) -> list[int]:
        """Numbers of the processes here; none once the group has gone."""
        try:
            return [int(each) for each in (self.directory / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self) -> None:
        """Remove the group once its processes have ended; one that does not empty is left to the next `find`."""
        until = time.monotonic() + REMOVE_S
        while True:
            try:
                return self.directory.rmdir()
            except FileNotFoundError:
                return None
            except OSError:
                if time.monotonic() > until:
                    return None
                time.sleep(0.005)


def find(proc: Path = Path("/proc/self")) -> Hierarchy | None:
    """The place where this process may make memory groups; None if there is none. Removes what killed processes left
    there."""
    for place in _places(proc):
        if os.access(place.directory, os.W_OK) and _works(place):
            _sweep(place.directory)
            return place
    return None


def of_process(pid: int, proc: Path = Path("/proc")) -> MemoryGroup | None:
    """The group that counts the memory of a process; None where this process cannot see it."""
    try:
        own = _own(proc / str(pid))
    except OSError:
        return None
    for mounted, root, version in _mounted(proc / "self"):
        group = MemoryGroup(_below(mounted, root, own.get("memory" if version == 1 else "", "/")), version)
        with contextlib.suppress(OSError):
            group.overflowed()
            if pid in group.members():
                return group
    return None


def _own(process: Path) -> dict[str, str]:
    """Paths of a process's groups by controller, "" for version 2."""
    own = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    return own


def _mounted(process: Path) -> list[tuple[str, str, int]]:
    """Hierarchies with memory groups that a process sees: where mounted, which part of the tree, and version."""
    found = []
    for line in (process / "mountinfo").read_text().splitlines():
        # ID, parent, device, root, mount point, options, optional fields, "-", type, source, options of the file system
        fields, _, kind = line.partition(" - ")
        root, mounted = fields.split()[3:5]
        kind, _, options = kind.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(","):
            found.append((mounted, root, 1))
        elif kind == "cgroup2":
            found.append((mounted, root, 2))
    return found


def _places(proc: Path) -> list[Hierarchy]:
    own = _own(proc)
    found = []
    for mounted, root, version in _mounted(proc):
        if version == 1:
            found.append(Hierarchy(_below(mounted, root, own.get("memory", "/")), 1))
        elif "" in own:
            mine = _below(mounted, root, own[""])
            beside = [mine.parent] if mine != Path(mounted) and _delegated(mine.parent) else []
            found += [Hierarchy(each, 2) for each in (mine, *beside) if _hands_memory_on(each)]
    return found


def _below(mounted: str, root: str, path: str) -> Path:
    """The directory of group `path` where the tree from `root` on is mounted."""
    inside = os.path.relpath(path, root) if path.startswith(root.rstrip("/") + "/") else "."
    return Path(mounted) / inside


def _hands_memory_on(directory: Path) -> bool:
    try:
        return "memory" in (directory / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _delegated(directory: Path) -> bool:
    """True if the group is this user's to divide: root may write everywhere, so there systemd's mark must say it."""
    if os.geteuid() != 0:
        return os.access(directory / "cgroup.procs", os.W_OK)
    for mark in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(directory, mark) == b"1":
                return True
    return False


def _works(place: Hierarchy) -> bool:
    try:
        place.make(2**24).remove()
    except OSError:
        return False
    return True


def _sweep(directory: Path) -> None:
    for left in directory.glob(f"{PREFIX}*-*"):
        if not psutil.pid_exists(int(left.name.removeprefix(PREFIX).partition("-")[0])):
            with contextlib.suppress(OSError):
                left.rmdir()
