"""Runs the tests of a task in a fresh sandbox, on the files that the model left.

    the model's sandbox -- tar of the directory --> restore kept files, add tests --> fresh sandbox: run the tests

Changes outside of the task's directory, running processes, and files in place of a test are not copied to the fresh
sandbox.
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
from slimx.extras.boxes.programs.enclosure import ProgramResult
from slimx.extras.boxes.protocol import Box, BoxRefusal
from slimx.extras.boxes.terminal.tasks import Task

_REPLACE = """
for file in ./* ./.[!.]* ./..?*; do [ "$file" = "./$1" ] || rm -rf -- "$file" || exit 1; done
tar -xf "$1" && rm -- "$1"
"""
CARRIED = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)


class NoVerdict(Exception):
    """Raised if the model's files cannot be copied to the fresh sandbox, which counts as failed tests."""


def packed(box: Box, directory: str, most: int) -> bytes:
    """Returns a directory of a sandbox as a tar archive of up to `most` bytes. Raises NoVerdict if that fails."""
    name = f".slimx-{secrets.token_hex(8)}.tar"
    result = box.run(["tar", "-cf", name, f"--exclude=./{name}", "."], cwd=directory)
    if not result.ok:
        raise NoVerdict(f"the sandbox's files cannot be archived (tar {result.ending}: {result.stderr.strip()[-300:]})")
    try:
        return box.get(f"{directory}/{name}", most)
    except BoxRefusal as error:
        raise NoVerdict(str(error)) from error


def judged(left: bytes, initial: bytes, task: Task, most: int) -> bytes:
    """Returns the archive that the tests run on: the model's files, the task's kept files, and the tests.

    `left`: archive of the files that the model left. `initial`: archive of the initial files, of which those that match
    `task.kept` are restored. `most`: maximum size without the tests, in bytes. Raises NoVerdict if it is exceeded, or
    if `left` is not a plain tar archive.
    """
    output = io.BytesIO()
    tests = _below(task.tests.files)
    with (
        tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as archive,
        tarfile.open(fileobj=io.BytesIO(initial), mode="r:") as before,
    ):
        targets = _Targets(tests)
        kept = []
        for member, content in _members(before):
            if _is_kept(member.name, task.kept) and not targets.bar(member):
                kept.append((member, content))
        targets = _Targets([*tests, *(member.name for member, _ in kept)])
        try:
            with Archive.open(fileobj=io.BytesIO(left), mode="r:") as after:
                for member, content in _members(after):
                    if (
                        not _is_kept(member.name, task.kept)
                        and not targets.bar(member)
                        and not _leads_to_kept(member, task.kept)
                    ):
                        _add(archive, member, content, output, most)
        except NoVerdict:
            raise
        except Exception as error:  # the model may have forged the archive, so reading it may raise any exception
            raise NoVerdict(
                f"the archive of the files that the model wrote is not a valid tar archive ({raised(error)})"
            ) from error
        for member, content in kept:
            _add(archive, member, content, output, most)
        for path, file in tests.items():
            archive.add(file, path)
    return output.getvalue()


def _members(source: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yields the members of an archive that may be copied, with their content.

    The members get new headers, because the program that unpacks the archive might interpret other header fields
    differently.
    """
    leaves = set[str]()
    for member in source:
        path = posixpath.normpath(member.name)
        outside = path in (".", "..") or path.startswith(("../", "/"))
        if member.type not in CARRIED or member.issparse() or outside or "\0" in path + member.linkname:
            continue
        if not leaves.isdisjoint(_up(path)[1:]):  # would be unpacked through a link or a file
            continue
        if not member.isdir():
            leaves.add(path)
        plain = tarfile.TarInfo(path)
        plain.type = member.type
        plain.linkname = member.linkname
        plain.mode = member.mode & 0o7777
        plain.mtime = int(member.mtime)
        content = None
        if member.isreg():
            plain.size = member.size
            content = source.extractfile(member)
        yield plain, content


def _add(
    archive: tarfile.TarFile, member: tarfile.TarInfo, content: IO[bytes] | None, output: IO[bytes], most: int
) -> None:
    if output.tell() + member.size > most:
        raise NoVerdict(f"the files that the model wrote exceed {most} bytes")
    archive.addfile(member, content)


def verdict(box: Box, archive: bytes, task: Task, stop: threading.Event | None = None) -> tuple[bool, ProgramResult]:
    """Runs the tests on `archive` in a fresh sandbox. Returns whether they passed, and the result of the test program.

    Raises NoVerdict if the archive cannot be unpacked, BoxRefusal if the sandbox refuses it.
    """
    name = f".slimx-{secrets.token_hex(8)}.tar"
    box.put(f"{task.directory}/{name}", archive)
    replaced = box.run(["sh", "-c", _REPLACE, "replace", name], cwd=task.directory, stop=stop)
    if not replaced.ok:
        raise NoVerdict(
            f"the files that the model wrote cannot be unpacked (sh {replaced.ending}: "
            f"{replaced.stderr.strip()[-300:]})"
        )
    result = box.run(task.tests.command, cwd=task.directory, stop=stop)
    output = f"{result.stdout}\n{result.stderr}"
    passed = result.ok and all(pattern.search(output) for pattern in task.tests.expect or ())
    return passed, result


def _below(directory: Path | None) -> dict[str, Path]:
    """Returns the files in a directory tree by their relative paths; {} if `directory` is None."""
    if directory is None:
        return {}
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}


def size_of_tests(task: Task) -> int:
    """Returns an upper bound on the size of the tests in the archive, in bytes."""
    size = tarfile.RECORDSIZE
    for path, file in _below(task.tests.files).items():
        size += file.stat().st_size + 3 * tarfile.BLOCKSIZE + 2 * len(path.encode())
    return size


def _up(path: str) -> list[str]:
    """Returns a path and its parent directories."""
    paths = [path]
    while parent := posixpath.dirname(paths[-1]):
        paths.append(parent)
    return paths


def _is_kept(path: str, patterns: tuple[str, ...]) -> bool:
    """Returns True if a path or one of its parent directories matches one of the patterns."""
    return any(fnmatch.fnmatchcase(parent, pattern) for parent in _up(path) for pattern in patterns)


def _leads_to_kept(member: tarfile.TarInfo, patterns: tuple[str, ...]) -> bool:
    """Returns True for a link through which a pattern may match files of the link's target.

    In fnmatch, * also matches /. A * at the start of a pattern is skipped: a path that it matches through the link also
    matches at its real location, in the target.
    """
    if not (member.issym() or member.islnk()):
        return False
    for pattern in patterns:
        for index, letter in enumerate(pattern):
            if index > 0 and letter in "/*?[":
                prefix = pattern[: index + 1] if letter == "*" else pattern[:index]
                if fnmatch.fnmatchcase(member.name, prefix):
                    return True
    return False


class _Targets:
    """Paths at which tests or kept files are written, and which the model's files must not occupy."""

    def __init__(self, paths: Iterable[str]):
        self._paths = {*paths}
        self._parents: set[str] = set()
        for path in self._paths:
            self._parents.update(_up(path)[1:])

    def bar(self, member: tarfile.TarInfo) -> bool:
        """Returns True for an archive member that must not be copied: it is at or below one of the paths, or it is a
        parent of one and not a directory."""
        if not self._paths.isdisjoint(_up(member.name)):
            return True
        return member.name in self._parents and not member.isdir()
