"""Installs a lock file into the environment of this Python: `slimx setup` and `make venv`.

    python slimx/extras/install/packages.py --lock cpu

Only Python's standard library is imported, and nothing of slimx: `make venv` runs this file before any package exists.

The locks are complete, and pip must not resolve them again: sglang's metadata asks for CUDA packages on every machine.
pip accepts no file of another hash than the lock's. torch from another index is another file, so it is installed first
and not again. A CUDA build from pip's own index needs CUDA libraries, and one from a named index those that it names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).with_name("locks")
"""Directory of the lock files: a link to requirements/ in the repository, copies in a wheel."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver, which exists on machines with a GPU."""
COMPILED = "transformer-engine-torch"
"""Package of the lock cu130 that is compiled against the installed torch, and therefore installed last."""
TIMEOUT_S = 15
"""Seconds after which the index of CPU builds counts as unreachable."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A lock file to install, and the package indexes of torch."""

    lock: str
    """Name of the lock: "cpu" or "cu130"."""
    file: Path
    """The lock file."""
    torch_index: str = ""
    """Package index from which torch is installed, without a fallback; "": chosen by `cpu_index`."""
    torch_cpu_index: str = TORCH_CPU_INDEX
    """Package index of torch's CPU builds, tried first on a machine without a GPU; "": not tried."""


def cpu_index(installation: Installation, driver: Path = DRIVER) -> str:
    """Returns the package index of CPU builds to try first; "" if torch comes from another index."""
    if installation.lock != "cpu" or installation.torch_index or driver.exists():
        return ""
    return installation.torch_cpu_index


def install(installation: Installation) -> None:
    """Installs the packages of a lock file into the environment of this Python, and marks it with the lock's name.
    Raises subprocess.CalledProcessError if pip fails; pip's messages are printed."""
    lines = installation.file.read_text().splitlines(keepends=True)
    torch_builds = [line.split()[0] for line in lines if line.startswith(("torch==", "torchvision=="))]
    if installation.torch_index:
        _pip("--no-deps", "--index-url", installation.torch_index, *torch_builds)
    index = cpu_index(installation)
    if index and not _installed_cpu_build(index, torch_builds):
        print(f"no CPU build of {torch_builds[0]} at {index}: pip's own index may give its CUDA build", flush=True)
    wheels = Path(sys.prefix, "wheels.txt")
    wheels.write_text("".join(line for line in lines if not line.startswith(COMPILED)))
    _pip("--no-deps", "--require-hashes", "-r", str(wheels))
    if any(line.startswith(COMPILED) for line in lines):
        settings = _compiler_settings()
        _pip("--no-deps", "--no-build-isolation", "--require-hashes", "-r", str(installation.file), added=settings)
    if _asks_for_cuda():
        _pip("--no-deps", "--require-hashes", "-r", str(LOCKS / "cpu-cuda.txt"))
    if installation.torch_index:
        _pip("--no-warn-conflicts", torch_builds[0])
    stamp(installation.lock).touch()


def stamp(lock: str) -> Path:
    """Returns the file that marks this environment as installed from `lock`."""
    return Path(sys.prefix, f".installed-{lock}")


def _installed_cpu_build(index: str, torch_builds: Sequence[str]) -> bool:
    try:
        _pip(
            *("--no-deps", "--retries", "0", "--timeout", str(TIMEOUT_S), "--index-url", index, *torch_builds),
            quiet=True,
        )
    except subprocess.CalledProcessError:
        return False
    return True


def _compiler_settings() -> dict[str, str]:
    """Returns environment variables for compiling `COMPILED`, which also needs CUDA_HOME. A toolkit has no cuDNN and no
    NCCL, and may lack the libraries whose headers torch includes: the wheels have them all."""
    nvidia = Path(sys.prefix, f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/nvidia")
    headers = [str(nvidia / library / "include") for library in ("cudnn", "nccl", "cu13")]
    return {"CPATH": os.pathsep.join(headers), "NVTE_PYTORCH_FORCE_BUILD": "TRUE"}


def _asks_for_cuda() -> bool:
    """Returns True if the installed torch is a build that requires the CUDA libraries of pip's own index."""
    importlib.invalidate_caches()
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(re.match(r"cuda-toolkit\b", requirement) for requirement in required)


def _pip(*arguments: str, quiet: bool = False, added: Mapping[str, str] | None = None) -> None:
    """Runs `pip install` for this Python. `quiet`: without pip's error messages; `added`: environment variables."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", *arguments],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(added or {})},
        stderr=subprocess.DEVNULL if quiet else None,
        check=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="install a lock file into the environment of this Python")
    parser.add_argument("--lock", choices=("cpu", "cu130"), default="cpu", help="name of the lock")
    parser.add_argument("--file", type=Path, help="file of the lock; default: the lock's own")
    parser.add_argument("--torch-index", default="", help="package index that torch comes from")
    parser.add_argument("--torch-cpu-index", default=TORCH_CPU_INDEX, help="package index of torch's CPU builds")
    options = parser.parse_args()
    file = options.file or LOCKS / f"{options.lock}.txt"
    try:
        install(Installation(options.lock, file, options.torch_index, options.torch_cpu_index))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
