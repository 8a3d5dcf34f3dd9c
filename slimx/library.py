"""Loading of the native libraries of `csrc/`; a missing, broken or outdated library is refused."""

from __future__ import annotations

import ctypes
from pathlib import Path

from slimx.errors import SlimxError


def load_library(path: Path, *, what: str, version: str, abi: int, remedy: str) -> ctypes.CDLL:
    """Loads the library at `path`, called `what` in errors, whose function `version` must return `abi`.

    Raises SlimxError ending with `remedy`, the instruction that builds a loadable library.
    """
    if not path.exists():
        raise SlimxError(f"{what} {path} is missing: {remedy}", code="library.missing", about=str(path))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SlimxError(
            f"{what} {path} cannot be loaded ({error}): {remedy}", code="library.broken", about=str(path)
        ) from error
    interface = getattr(library, version)() if hasattr(library, version) else None
    if interface != abi:
        raise SlimxError(
            f"{what} {path} is stale (interface {interface}, slimx needs {abi}): {remedy}",
            code="library.stale",
            about=str(path),
        )
    return library
