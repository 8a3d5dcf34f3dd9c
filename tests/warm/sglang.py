"""Runs Python programs in forks of a process that has imported SGLang for the CPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from unittest.mock import patch

from slimx.engines.server.launch import prepare
from tests.warm.fork import Fork
from tests.warm.interpreter import ROOT, interpreter

DEADLINE_S = 800.0
"""Seconds for one program, for hangs."""


def run_with_sglang(
    *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` as `subprocess.run` does; `environment` is added to that of a server on the CPU."""
    with TemporaryFile("w+") as source, TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        source.write(stdin)
        source.seek(0)
        with patch.dict(os.environ):
            prepare(["--device", "cpu"])
            os.environ.update(environment or {})
            files = (source.fileno(), output.fileno(), errors.fileno())
            program = Fork(interpreter().parent, "server", list(arguments), files, cwd=cwd, tied=True)
        try:
            status = program.wait(DEADLINE_S)
        finally:
            program.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())
