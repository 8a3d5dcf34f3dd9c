"""Someone who has just cloned the repository and copies the commands of its pages: a home directory that has what
`make quickstart` leaves before it trains, in which commands are executed in this process.

What would train, generate or install is executed as far as it needs no process, GPU, network or minutes:

- `make TARGET` as a dry run, which fails for a target that is not there;
- `slimx train`, `generate` and `eval` with all checks that they make before they start anything;
- every other command of slimx as it stands.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from slimx.config import load_config
from slimx.orchestration.prepare import check_run
from tests.documents import ROOT
from tools.docs.typed import typed
from tools.quickstart.make_model import make_model
from tools.quickstart.make_task import make_task

LINKED = ("configs", "docs", "examples", "requirements", "setup.py", "tools", "Makefile", "pyproject.toml")


def make_home(home: Path) -> None:
    """Fill `home` with the repository's files and the quickstart's data."""
    for name in LINKED:
        (home / name).symlink_to(ROOT / name)
    data = home / "runs" / "quickstart-data"
    make_model(data / "model", seed=0)
    make_task(data)
    shutil.copytree(data / "model", home / "runs" / "quickstart-sft" / "hf")  # what the warm start exports


def execute(words: Sequence[str]) -> int:
    """Exit status of a command in the working directory, a home."""
    program, *arguments = words
    if program == "make":
        done = subprocess.run(["make", "--dry-run", *arguments, f"VENV={ROOT / '.venv'}"], capture_output=True)
        return done.returncode
    assert Path(program).name == "slimx", words
    if arguments[0] in ("train", "generate", "eval"):
        check_run(load_config(arguments[1], arguments[2:]))
        return 0
    status, said = typed(arguments)
    print(said)
    return status
