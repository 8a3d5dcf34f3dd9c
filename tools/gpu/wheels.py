"""Collects what the trainer needs beside numpy, torch and pytest, as wheels for a GPU machine: `make gpu-wheels`.

    python tools/gpu/wheels.py [--python 3.12] [--out build/gpu-wheels]

For machines where nothing can be installed from the network: tools/gpu/check.py unpacks the folder into a directory of
its own, for the trainer's test alone. Versions are those of requirements/cpu.txt; Linux x86-64. The folder is emptied
first, and stays below 64 MiB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-wheels"
PACKAGES = (
    "megatron-core",
    "einops",  # megatron-core imports it
    "packaging",  # likewise
    "psutil",  # likewise, undeclared
    "pydantic",  # slimx.config; with the next three
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "omegaconf",  # slimx.config; with the next two
    "antlr4-python3-runtime",
    "PyYAML",
    "msgspec",  # slimx.data and checkpoints
    "xxhash",  # digests of checkpoint files
    "safetensors",  # weights
)
"""All that `slimx.trainer` imports, in an environment that has numpy and torch."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT = 64 * 2**20


def pinned(names: tuple[str, ...], lock: Path) -> list[str]:
    """`name==version` of each name, as the lock has it; exits naming one that it lacks."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    found = dict(re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*])?==(\S+)", lock.read_text(), re.MULTILINE))
    versions = {normal(name): version for name, version in found.items()}
    absent = [name for name in names if normal(name) not in versions]
    if absent:
        sys.exit(f"{lock} has no {', '.join(absent)}: add it there, or take it out of tools/gpu/wheels.py")
    return [f"{name}=={versions[normal(name)]}" for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's interpreter")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    wanted = pinned(PACKAGES, ROOT / "requirements" / "cpu.txt")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", options.python, "--implementation", "cp", "--dest", str(options.out)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    if code := subprocess.run([*command, *wanted]).returncode:
        sys.exit(code)
    size = sum(wheel.stat().st_size for wheel in options.out.iterdir())
    if size > LIMIT:
        sys.exit(f"{options.out} has {size / 2**20:.0f} MiB, more than {LIMIT >> 20}: take a package out")
    print(f"{options.out}: {len(wanted)} wheels for Python {options.python}, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
