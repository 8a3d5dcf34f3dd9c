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
    """Exit status and output of `slimx ARGUMENTS` in the working directory. An error that slimx does not tell of goes
    through."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "argv", ["slimx", *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        _own_modules(Path.cwd()),
    ):
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return status, said.getvalue()


def typed_beside(files: Mapping[str, str | bytes], arguments: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of `slimx ARGUMENTS` in a directory of its own with `files`, by path. In the output the
    directory is called DIRECTORY."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="slimx-typed-") as name:
        directory = Path(name).resolve()
        for path, content in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content.encode() if isinstance(content, str) else content)
        os.chdir(directory)
        try:
            status, said = typed(arguments)
        finally:
            os.chdir(before)
    return status, said.replace(str(directory), "DIRECTORY")


@contextlib.contextmanager
def _own_modules(directory: Path) -> Iterator[None]:
    """Imports the modules of `directory` anew, whatever else had their names in this process, and forgets them."""
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
