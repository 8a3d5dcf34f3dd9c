"""Prints the machine and the versions that figures belong to: `python -m tools.gpu.machine`.

Ends with status 2 and the reason where the kernels do not load there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from slimx.reshard.kernels import cuda

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("driver", ("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader")),
    ("nvcc", ("nvcc", "--version")),
    ("commit", ("git", "log", "-1", "--format=%h")),
)


def last_line(command: tuple[str, ...]) -> str:
    """Returns the last line that a command prints; "" if the program does not exist."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if reason := cuda.missing():
        print(reason, file=sys.stderr)
        return 2
    found = torch.cuda.get_device_properties(0)
    memory = f"{found.total_memory / 2**30:.1f} GiB"
    facts = [f"{found.name}, {found.multi_processor_count} processors, {memory}, sm_{found.major}{found.minor}"]
    facts += [f"torch {torch.__version__}", f"numpy {np.__version__}", f"Python {sys.version.split()[0]}"]
    facts += [f"{name} {line}" for name, command in COMMANDS if (line := last_line(command))]
    print("; ".join(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
