"""Builds the libraries of csrc/ with their CUDA halves, unless they are up to date: `python -m tools.gpu.library`.

Those that were built on another machine and carried along count: what is compared is the digest of their sources, not
the time of the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CUDA_LIBRARY = "libslimx_cuda.so"
STAMP = "built.json"
"""Name of the file in the libraries' directory with the digests of their sources and of the built libraries."""


def has_nvcc() -> bool:
    """Returns whether there is a CUDA compiler where setup.py looks for one."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    return any(shutil.which("nvcc", path=place) for place in (None, *(f"{home}/bin" for home in homes if home)))


def sources(root: Path) -> str:
    """Returns the digest of all that the libraries are built of."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in (root / "setup.py", *sorted((root / "csrc").iterdir())):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def libraries(root: Path) -> dict[str, str]:
    """Returns the digest of every library by its name."""
    files = sorted((root / "slimx" / "_lib").glob("*.so"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_stamp(root: Path) -> None:
    """Notes that the libraries are built of the present sources."""
    stamp = {"sources": sources(root), "libraries": libraries(root)}
    (root / "slimx" / "_lib" / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")


def up_to_date(root: Path) -> bool:
    """Returns whether the libraries, CUDA's among them, are those that were built of the present sources."""
    path = root / "slimx" / "_lib" / STAMP
    if not path.exists():
        return False
    built = libraries(root)
    return CUDA_LIBRARY in built and json.loads(path.read_text()) == {"sources": sources(root), "libraries": built}


def build(root: Path) -> int:
    """Builds the libraries in place; returns the exit status."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    status = subprocess.run(command, cwd=root, env={**os.environ, "SLIMX_CUDA": "1"}).returncode
    if status == 0:
        write_stamp(root)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stamp", action="store_true", help="note that those that are there were just built")
    if parser.parse_args().stamp:
        write_stamp(ROOT)
        return 0
    done = "up to date"
    if not up_to_date(ROOT):
        if status := build(ROOT):
            return status
        done = "built"
    size = sum(path.stat().st_size for path in (ROOT / "slimx" / "_lib").glob("*.so"))
    print(f"{done}: {len(libraries(ROOT))} libraries, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
