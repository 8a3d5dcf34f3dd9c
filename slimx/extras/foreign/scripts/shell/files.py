"""Files that a script names, and their texts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from slimx.errors import SlimxError

_FILE_SIZE = 1 << 20
"""Maximum number of bytes of a file that a script runs."""


def text_of(file: Path) -> str:
    """Returns the text of a file. Raises SlimxError if it is not UTF-8, which would change names and paths in it."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SlimxError(
            f"{file} is not UTF-8 (byte {error.start + 1} is no character of it); save the file as UTF-8",
            code="foreign.not_utf8",
            about=str(file),
        ) from error


def read_file(name: str, folder: str) -> tuple[Path, str] | None:
    """Returns the path and the text of a file, which is looked for in `folder` and here; None if there is none."""
    for start in (folder, ""):
        path = os.path.join(os.path.expanduser(start), os.path.expanduser(name))
        with contextlib.suppress(OSError):
            if os.path.isfile(path) and os.path.getsize(path) <= _FILE_SIZE:
                return Path(path), text_of(Path(path))
    return None
