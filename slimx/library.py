"""Loading of the native libraries of `csrc/`, one that is missing, broken or older than this code being refused."""

from __future__ import annotations

import ctypes
from pathlib import Path

from slimx.errors import SlimxError


def load_library(path: Path, *, what: str, version: str, abi: int, remedy: str) -> ctypes.CDLL:
    """Load the library at `path`, `what` in errors, whose function `version` must answer `abi`.

    Raises SlimxError, which ends with `remedy`: what makes a library that can be loaded.
    """
    if not path.exists():
        raise SlimxError(f"{what} {path} is missing: {remedy}", code="library.missing", about=str(path))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SlimxError(
            f"{what} {path} cannot be loaded ({error}): {remedy}", code="library.broken", about=str(path)
        ) from error
    found = getattr(library, version)() if hasattr(library, version) else None
    if found != abi:
        raise SlimxError(
            f"{what} {path} is stale (interface {found}, slimx needs {abi}): {remedy}",
            code="library.stale",
            about=str(path),
        )
    return library
