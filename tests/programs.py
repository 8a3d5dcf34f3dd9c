"""Programs of the repository, run to their end as forks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.warm.interpreter import ROOT, interpreter

PARSE = ("-m", "tests.parse_only")
"""Before the words of a program that ends once its options are parsed."""


def run_program(
    words: Sequence[str], directory: Path, *, parse_only: bool = False, deadline_s: float = 300
) -> tuple[int, str]:
    """Returns the exit status and the output of a program without a GPU.

    `words`: ["-m", MODULE, ...], or [FILE, ...] relative to the repository. `directory`: that it runs in. `parse_only`:
    ends with status 0 once the options are parsed. Raises subprocess.TimeoutExpired after `deadline_s` seconds.
    """
    program = words if words[0] == "-m" else [str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(
        [interpreter(), *(PARSE if parse_only else ()), *program],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=deadline_s,
    )
    return done.returncode, done.stdout
