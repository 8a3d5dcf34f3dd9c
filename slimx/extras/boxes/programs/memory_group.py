"""A memory control group (cgroup) for one program in the sandbox.

It counts all memory of the program's processes, including memory that no process maps: files in memory, shared
segments, kernel buffers.

    Hierarchy: where this process may create groups -- make --> MemoryGroup: limit, members, overflow, remove

Groups of cgroup v1 are created below this process's group, if it may write there (root). Groups of v2 are created below
that group or as its siblings, if that part of the tree enables the memory controller and is delegated to this user (a
systemd user session, a unit with Delegate=yes). This module moves no other process and configures only groups that it
created, so limits set on this process stay in force for its programs.
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
"""Maximum time in seconds to wait for the last process of a group to exit."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Directory of the cgroup file system in which this process can create memory groups."""

    directory: Path
    version: int

    def make(self, limit: int) -> MemoryGroup:
        """Creates a group with a memory limit of `limit` bytes. Raises OSError if the kernel refuses to create or limit
        it."""
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
            with contextlib.suppress(OSError):  # raised without swap or swap accounting
                (self.directory / "memory.memsw.limit_in_bytes").write_text(str(size))
        else:
            (self.directory / "memory.max").write_text(str(size))
            with contextlib.suppress(OSError):
                (self.directory / "memory.swap.max").write_text("0")

    def take(self, pid: int) -> None:
        """Moves a process into the group; processes that it starts later belong to the group as well."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def overflowed(self) -> bool:
        """Returns True once the kernel has killed a process of the group for exceeding the limit."""
        events = "memory.oom_control" if self.version == 1 else "memory.events"
        counts = dict(line.split() for line in (self.directory / events).read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0

    def members(self) -> list[int]:
        """Returns the ids of the group's processes; [] once the group is removed."""
        try:
            return [int(pid) for pid in (self.directory / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self) -> None:
        """Removes the group once its processes have exited. If some are still running after `REMOVE_S` seconds, leaves
        its removal to a later call of `find`."""
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
    """Returns a hierarchy in which this process may create memory groups; None if there is none.

    Removes groups that killed processes left there. `proc`: directory of this process in /proc.
    """
    for hierarchy in _hierarchies(proc):
        if os.access(hierarchy.directory, os.W_OK) and _works(hierarchy):
            _sweep(hierarchy.directory)
            return hierarchy
    return None


def of_process(pid: int, proc: Path = Path("/proc")) -> MemoryGroup | None:
    """Returns the group that counts the memory of a process; None if this process cannot see that group."""
    try:
        paths = _group_paths(proc / str(pid))
    except OSError:
        return None
    for mounted, root, version in _mounted(proc / "self"):
        controller = "memory" if version == 1 else ""
        group = MemoryGroup(_below(mounted, root, paths.get(controller, "/")), version)
        with contextlib.suppress(OSError):
            group.overflowed()
            if pid in group.members():
                return group
    return None


def _group_paths(process: Path) -> dict[str, str]:
    """Returns the cgroup paths of a process by controller name; the cgroup v2 path, which belongs to no single
    controller, has the key ""."""
    paths: dict[str, str] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _mounted(process: Path) -> list[tuple[str, str, int]]:
    """Returns the cgroup hierarchies that a process sees (of cgroup v1, only the one with the memory controller), each
    as (mount point, root within the hierarchy, cgroup version)."""
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


def _hierarchies(proc: Path) -> list[Hierarchy]:
    paths = _group_paths(proc)
    found = []
    for mounted, root, version in _mounted(proc):
        if version == 1:
            found.append(Hierarchy(_below(mounted, root, paths.get("memory", "/")), 1))
        elif "" in paths:
            current = _below(mounted, root, paths[""])
            candidates = [current]
            if current != Path(mounted) and _delegated(current.parent):
                candidates.append(current.parent)
            for directory in candidates:
                if _enables_memory(directory):
                    found.append(Hierarchy(directory, 2))
    return found


def _below(mounted: str, root: str, path: str) -> Path:
    """Returns the directory of the cgroup `path`, given that the subtree `root` of its hierarchy is mounted at
    `mounted`; `mounted` itself if the group is not below `root`."""
    if path.startswith(root.rstrip("/") + "/"):
        return Path(mounted) / os.path.relpath(path, root)
    return Path(mounted)


def _enables_memory(directory: Path) -> bool:
    try:
        return "memory" in (directory / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _delegated(directory: Path) -> bool:
    """Returns True if this user may create groups in `directory`.

    root can write to every directory, so if this user is root, systemd must have marked the directory as delegated.
    """
    if os.geteuid() != 0:
        return os.access(directory / "cgroup.procs", os.W_OK)
    for mark in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(directory, mark) == b"1":
                return True
    return False


def _works(hierarchy: Hierarchy) -> bool:
    try:
        hierarchy.make(2**24).remove()
    except OSError:
        return False
    return True


def _sweep(directory: Path) -> None:
    for left in directory.glob(f"{PREFIX}*-*"):
        if not psutil.pid_exists(int(left.name.removeprefix(PREFIX).partition("-")[0])):
            with contextlib.suppress(OSError):
                left.rmdir()
