"""Loading of the native libraries built from `csrc/`. A missing, broken or outdated library is an error."""

from __future__ import annotations

import ctypes
from pathlib import Path

from slimx.errors import SlimxError


def load_library(path: Path, *, what: str, version: str, abi: int, remedy: str) -> ctypes.CDLL:
    """Loads and returns the native library at `path`.

    `what`: name of the library in errors. `version`: name of the library's function that returns its ABI version, which
    must equal `abi`. `remedy`: instruction for building a library that can be loaded, appended to error messages.
    Raises SlimxError if the library is missing, broken or outdated.
    """
    if not path.exists():
        raise SlimxError(f"{what} {path} is missing; {remedy}", code="library.missing", about=str(path))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SlimxError(
            f"{what} {path} cannot be loaded ({error}); {remedy}", code="library.broken", about=str(path)
        ) from error
    interface = getattr(library, version)() if hasattr(library, version) else None
    if interface != abi:
        raise SlimxError(
            f"{what} {path} has ABI version {interface}, but slimx needs {abi}; {remedy}",
            code="library.stale",
            about=str(path),
        )
    return library
