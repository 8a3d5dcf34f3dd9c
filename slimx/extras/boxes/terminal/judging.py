"""The verdict on a task: its tests, run in a fresh box with the files that the model left in its own.

    the model's box -- tar of the directory --> kept files as they were, tests put in place --> fresh box: run the tests

What the model has changed outside of its directory, started, or put in the way of a test does not come along.
"""

from __future__ import annotations

import fnmatch
import io
import posixpath
import secrets
import tarfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from slimx.errors import raised
from slimx.extras.boxes.archives import Archive
from slimx.extras.boxes.programs.enclosure import Ran
from slimx.extras.boxes.protocol import Box, BoxRefusal
from slimx.extras.boxes.terminal.tasks import Task

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
        raise NoVerdict(f"the files cannot be read (tar {ran.ending}): {ran.stderr.strip()[-300:]}")
    try:
        return box.get(f"{directory}/{name}", most)
    except BoxRefusal as error:
        raise NoVerdict(str(error)) from error


def judged(left: bytes, began: bytes, task: Task, most: int) -> bytes:
    """The archive that the tests run on: files that were `left`, `began` where `task.kept` says so, and the tests.

    `most`: bytes of all but the tests. Raises NoVerdict for more, and for what is no plain tar archive."""
    made, tests = io.BytesIO(), _below(task.tests.files)
    with (
        tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive,
        tarfile.open(fileobj=io.BytesIO(began), mode="r:") as before,
    ):
        places = _Places(tests)
        kept = [
            (member, content)
            for member, content in _members(before)
            if _kept(member.name, task.kept) and not places.bar(member)
        ]
        places = _Places({*tests, *(member.name for member, _ in kept)})
        try:
            with Archive.open(fileobj=io.BytesIO(left), mode="r:") as after:
                for member, content in _members(after):
                    if not (_kept(member.name, task.kept) or places.bar(member) or _leads_to_kept(member, task.kept)):
                        _add(archive, member, content, made, most)
        except NoVerdict:
            raise
        except Exception as error:  # the model may have written the archive: whatever reading it raises
            raise NoVerdict(f"the files are no archive ({raised(error)})") from error
        for member, content in kept:
            _add(archive, member, content, made, most)
        for path, file in tests.items():
            archive.add(file, path)
    return made.getvalue()


def _members(source: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Members of an archive that may be carried, with their content. Their headers are made anew: what else one said
    might mean something else to the program that unpacks it."""
    leaves = set[str]()
    for member in source:
        path = posixpath.normpath(member.name)
        outside = path in (".", "..") or path.startswith(("../", "/"))
        if member.type not in CARRIED or member.issparse() or outside or "\0" in path + member.linkname:
            continue
        if any(each in leaves for each in _up(path)[1:]):  # would be unpacked through a link
            continue
        if not member.isdir():
            leaves.add(path)
        plain = tarfile.TarInfo(path)
        plain.type, plain.linkname, plain.mode = member.type, member.linkname, member.mode & 0o7777
        plain.mtime, plain.size = int(member.mtime), member.size if member.isreg() else 0
        yield plain, source.extractfile(member) if member.isreg() else None


def _add(
    archive: tarfile.TarFile, member: tarfile.TarInfo, content: IO[bytes] | None, made: IO[bytes], most: int
) -> None:
    if made.tell() + member.size > most:
        raise NoVerdict(f"the files have more than {most} bytes")
    archive.addfile(member, content)


def verdict(box: Box, archive: bytes, task: Task, stop: threading.Event | None = None) -> tuple[bool, Ran]:
    """Run the tests on `archive` in a fresh box: True if they have passed. Raises NoVerdict, and BoxRefusal where the
    box does not take the archive."""
    name = f".slimx-{secrets.token_hex(8)}.tar"
    box.put(f"{task.directory}/{name}", archive)
    replaced = box.run(["sh", "-c", _REPLACE, "replace", name], cwd=task.directory, stop=stop)
    if not replaced.ok:
        raise NoVerdict(f"the files cannot be unpacked (sh {replaced.ending}): {replaced.stderr.strip()[-300:]}")
    ran = box.run(task.tests.command, cwd=task.directory, stop=stop)
    said = f"{ran.stdout}\n{ran.stderr}"
    return ran.ok and all(each.search(said) for each in task.tests.expect or ()), ran


def _below(directory: Path | None) -> dict[str, Path]:
    """Files below a directory by their paths in it."""
    if directory is None:
        return {}
    return {each.relative_to(directory).as_posix(): each for each in sorted(directory.rglob("*")) if each.is_file()}


def size_of_tests(task: Task) -> int:
    """Bytes that the tests take in the archive at most."""
    return (
        sum(
            each.stat().st_size + 3 * tarfile.BLOCKSIZE + 2 * len(path.encode())
            for path, each in _below(task.tests.files).items()
        )
        + tarfile.RECORDSIZE
    )


def _up(path: str) -> list[str]:
    """A path and the directories above it."""
    above = [path]
    while parent := posixpath.dirname(above[-1]):
        above.append(parent)
    return above


def _kept(path: str, patterns: tuple[str, ...]) -> bool:
    """True if a path, or a directory above it, matches one of the patterns."""
    return any(fnmatch.fnmatchcase(each, pattern) for each in _up(path) for pattern in patterns)


def _leads_to_kept(member: tarfile.TarInfo, patterns: tuple[str, ...]) -> bool:
    """True for a link where one of the patterns may match something below it, which would be what it leads to.

    The * of fnmatch also matches /. One at the beginning of a pattern is not looked at: whatever it matches below a
    link, it matches below what the link leads to."""
    if not (member.issym() or member.islnk()):
        return False
    cuts = ((pattern, at) for pattern in patterns for at, letter in enumerate(pattern) if at > 0 and letter in "/*?[")
    return any(
        fnmatch.fnmatchcase(member.name, pattern[: at + 1] if pattern[at] == "*" else pattern[:at])
        for pattern, at in cuts
    )


class _Places:
    """Places of files that are put where the model may have left something."""

    def __init__(self, paths: Iterable[str]):
        self._at = {*paths}
        self._above = {above for path in self._at for above in _up(path)[1:]}

    def bar(self, member: tarfile.TarInfo) -> bool:
        """True for what lies where one of the files will be, or below it, and for what is no directory above it."""
        return not self._at.isdisjoint(_up(member.name)) or (member.name in self._above and not member.isdir())
