"""A directory and tokens that no other user of the machine can read."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from slimx.errors import SlimxError

SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
OF_A_SOCKET = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.00")
"""Bytes of the longest path of a socket that parts of a run put into the private directory: Ray's."""


def private_directory() -> Path:
    """Returns the directory in TMPDIR (else /tmp) that this user alone can enter; makes it where it is not there.

    Raises SlimxError where another user made it first, where nothing can be written, or where TMPDIR is so long that
    paths of sockets in it would be too long."""
    directory = Path(tempfile.gettempdir(), f"slimx-{os.getuid()}")
    room = SOCKET_BYTES - OF_A_SOCKET - len(os.fsencode(directory))
    if room < 0:
        raise SlimxError(
            f"TMPDIR is {directory.parent}, {-room} bytes too long: sockets are made in it, whose paths have at most "
            f"{SOCKET_BYTES} bytes; set TMPDIR to a shorter path",
            code="tmpdir.length",
            about="TMPDIR",
        )
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and found.st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise SlimxError(
            f"{directory} cannot be made ({error.strerror}); set TMPDIR to a directory in which you can write",
            code="tmpdir.unwritable",
            about="TMPDIR",
        ) from error
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise SlimxError(
            f"{directory} is not this user's own directory, so that others could exchange its files; remove it, or "
            "set TMPDIR to another directory",
            code="tmpdir.owner",
            about=str(directory),
        )
    return directory


def private_token(file: Path) -> str:
    """Returns the token in `file`, which its owner alone can read; writes a random one where there is none. Raises
    OSError if it cannot be read or written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)
    token = file.read_text().strip()
    if not token:  # new, or left by a process that was killed here
        token = secrets.token_hex(32)
        file.write_text(token)
    return token
