"""Commands of slimx as a user types them, run in this process in a directory with given files: what they print."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from slimx import cli


def typed(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs `slimx ARGUMENTS` in the working directory and returns exit status and output. Errors that slimx does not
    handle propagate."""
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch.object(sys, "argv", ["slimx", *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        _fresh_modules(Path.cwd()),
    ):
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return status, output.getvalue()


def typed_in(files: Mapping[str, str | bytes], arguments: Sequence[str]) -> tuple[int, str]:
    """Runs `slimx ARGUMENTS` in a new directory with `files`, by path, and returns exit status and output. The output
    shows DIRECTORY in place of the directory's path."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="slimx-typed-") as name:
        directory = Path(name).resolve()
        for path, content in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content.encode() if isinstance(content, str) else content)
        os.chdir(directory)
        try:
            status, output = typed(arguments)
        finally:
            os.chdir(before)
    return status, output.replace(str(directory), "DIRECTORY")


@contextlib.contextmanager
def _fresh_modules(directory: Path) -> Iterator[None]:
    """Imports the modules of `directory` afresh, even if modules with the same names are loaded, and unloads them at
    the end."""
    hidden = {file.stem: sys.modules.pop(file.stem) for file in directory.glob("*.py") if file.stem in sys.modules}
    before = set(sys.modules)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).resolve().is_relative_to(directory.resolve()):
                del sys.modules[name]
        sys.modules |= hidden
