"""`slimx convert` in a fork of a process that has imported torch already:

    python -m tests.integration.converting ARGUMENT...

The last line says by how many MB its resident memory grew at most, mapped files included.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slimx.cli import main as slimx


def held(key: str) -> int:
    """A line of this process's status in MB."""
    return int(re.search(rf"{key}:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) // 1024


def main() -> None:
    sys.argv = ["slimx", "convert", *sys.argv[1:]]
    before = held("VmRSS")
    try:
        slimx()
    finally:
        print("grew", held("VmHWM") - before)


if __name__ == "__main__":
    main()
