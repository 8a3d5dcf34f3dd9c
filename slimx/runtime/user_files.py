"""A directory and tokens that no other user of this machine can read."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from slimx.errors import SlimxError

SOCKET_BYTES = 107
"""Maximum length of a Unix socket's path, in bytes."""
SOCKET_NAME_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.00")
"""Length in bytes of the longest socket path that a run creates in the private directory, relative to that directory;
the socket is one of Ray's."""


def private_directory() -> Path:
    """Returns the directory in TMPDIR (default: /tmp) that only this user can enter, and creates it if it is missing.

    Raises SlimxError if another user has created it, if it cannot be created, or if TMPDIR is so long that paths of
    sockets in the directory would exceed `SOCKET_BYTES`."""
    directory = Path(tempfile.gettempdir(), f"slimx-{os.getuid()}")
    room = SOCKET_BYTES - SOCKET_NAME_BYTES - len(os.fsencode(directory))
    if room < 0:
        raise SlimxError(
            f"TMPDIR={directory.parent} is {-room} bytes too long, because paths of sockets in TMPDIR may have at most "
            f"{SOCKET_BYTES} bytes; set TMPDIR to a shorter path",
            code="tmpdir.length",
            about="TMPDIR",
        )
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise SlimxError(
            f"{directory} cannot be created ({error.strerror}); set TMPDIR to a writable directory",
            code="tmpdir.unwritable",
            about="TMPDIR",
        ) from error
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise SlimxError(
            f"{directory} is not a directory owned by this user, so other users could replace files in it; remove this "
            "path, or set TMPDIR to another directory",
            code="tmpdir.owner",
            about=str(directory),
        )
    return directory


def private_token(file: Path) -> str:
    """Returns the token in `file`, which only the file's owner can read. If the file is missing or empty, a random
    token is written first. Raises OSError if the file cannot be read or written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)
    token = file.read_text().strip()
    if not token:  # a new file, or left empty by a process that was killed before writing
        token = secrets.token_hex(32)
        file.write_text(token)
    return token
