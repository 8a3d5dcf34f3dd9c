"""The verdict on a task: its tests, run in a fresh box with the files that the model left in its own.

    the model's box -- tar of the directory --> kept files as they were, tests put in place --> fresh box: run the tests

What the model has changed outside of its directory, started, or put in the way of a test does not come along.
"""

from __future__ import annotations

import fnmatch
import io
import posixpath
import re
import secrets
import tarfile
import threading
from pathlib import Path

from slimx.environments.boxes.protocol import Box, BoxRefusal
from slimx.environments.enclosure import Ran
from slimx.environments.terminal.tasks import Task

_REPLACE = """
for each in ./* ./.[!.]* ./..?*; do [ "$each" = "./$1" ] || rm -rf -- "$each" || exit 1; done
tar -xf "$1" && rm -- "$1"
"""
CARRIED = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)


class NoVerdict(Exception):
    """Raised where what the model left cannot be carried to the tests: it has failed."""


def packed(box: Box, directory: str, most: int) -> bytes:
    """A directory of a box as an archive of up to `most` bytes. Raises NoVerdict."""
    name = f".slimx-{secrets.token_hex(8)}.tar"
    ran = box.run(["tar", "-cf", name, f"--exclude=./{name}", "."], cwd=directory)
    if not ran.ok:
        raise NoVerdict(f"the files cannot be read ({_ending(ran)}): {ran.stderr.strip()[-300:]}")
    try:
        return box.get(f"{directory}/{name}", most)
    except BoxRefusal as error:
        raise NoVerdict(str(error)) from error


def judged(left: bytes, began: bytes, task: Task) -> bytes:
    """The archive that the tests run on: files that were `left`, `began` where `task.kept` says so, and the tests.
    Raises NoVerdict for what is no archive."""
    made, tests = io.BytesIO(), _below(task.tests)
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(left)) as after,
            tarfile.open(fileobj=io.BytesIO(began)) as before,
            tarfile.open(fileobj=made, mode="w") as archive,
        ):
            for source, kept in ((after, False), (before, True)):
                for member in source:
                    path = posixpath.normpath(member.name)
                    if member.type not in CARRIED or path == "." or path.startswith(("../", "/")):
                        continue
                    if _kept(path, task.kept) is kept and not _in_the_way(path, member, tests):
                        archive.addfile(member, source.extractfile(member) if member.isreg() else None)
            for path, file in tests.items():
                archive.add(file, path)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise NoVerdict(f"the files are no archive ({error})") from error
    return made.getvalue()


def verdict(box: Box, archive: bytes, task: Task, stop: threading.Event | None = None) -> tuple[bool, Ran]:
    """Run the tests on `archive` in a fresh box: True if they have passed. Raises NoVerdict."""
    name = f".slimx-{secrets.token_hex(8)}.tar"
    try:
        box.put(f"{task.directory}/{name}", archive)
    except BoxRefusal as error:
        raise NoVerdict(str(error)) from error
    replaced = box.run(["sh", "-c", _REPLACE, "replace", name], cwd=task.directory, stop=stop)
    if not replaced.ok:
        raise NoVerdict(f"the files cannot be unpacked ({_ending(replaced)}): {replaced.stderr.strip()[-300:]}")
    ran = box.run(list(task.command), cwd=task.directory, stop=stop)
    said = f"{ran.stdout}\n{ran.stderr}"
    return ran.ok and all(re.search(each, said) for each in task.expect), ran


def _below(directory: Path | None) -> dict[str, Path]:
    """Files below a directory by their paths in it."""
    if directory is None:
        return {}
    return {each.relative_to(directory).as_posix(): each for each in sorted(directory.rglob("*")) if each.is_file()}


def _kept(path: str, patterns: tuple[str, ...]) -> bool:
    """True if a path, or a directory above it, matches one of the patterns."""
    above = [path]
    while parent := posixpath.dirname(above[-1]):
        above.append(parent)
    return any(fnmatch.fnmatchcase(each, pattern) for each in above for pattern in patterns)


def _in_the_way(path: str, member: tarfile.TarInfo, tests: dict[str, Path]) -> bool:
    """True for what lies where a test or a directory above one will be, and for what lies below a test."""
    return any(
        path == each or path.startswith(f"{each}/") or (each.startswith(f"{path}/") and not member.isdir())
        for each in tests
    )


def _ending(ran: Ran) -> str:
    return f"status {ran.status}" if ran.ended == "exit" else f"over the limit of {ran.ended}"
