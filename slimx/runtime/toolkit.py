"""The CUDA toolkit that compiles kernels while a process runs: where it is, and telling those who look for it."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

USUAL = Path("/usr/local/cuda")
WHEEL = "nvidia/cu13"
"""Directory of site-packages in which the wheel nvidia-cuda-nvcc of the CUDA lock puts bin/nvcc."""


def cuda_home(environment: MutableMapping[str, str], packages: Path | None = None) -> Path | None:
    """Returns the home of the toolkit: the one that CUDA_HOME or CUDA_PATH names, that of the nvcc on PATH, the usual
    place, or the lock's wheel in `packages` (site-packages of this Python); None if there is none.

    An nvcc on PATH may be a script that starts one elsewhere, so a home needs libraries, too."""
    if given := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(given)
    compiler = shutil.which("nvcc", path=environment.get("PATH"))
    on_path = Path(compiler).resolve().parents[1] if compiler else USUAL
    wheel = (packages or Path(sysconfig.get_path("purelib"))) / WHEEL
    homes = [(on_path, "lib64/libcudart.so"), (USUAL, "lib64/libcudart.so"), (wheel, "bin/nvcc")]
    return next((home for home, needed in homes if (home / needed).exists()), None)


def set_cuda_home(environment: MutableMapping[str, str], packages: Path | None = None) -> None:
    """Set CUDA_HOME where nothing else tells it: DeepGEMM and DeepEP fail an assertion while they are imported if they
    find no toolkit, and neither looks for the wheel."""
    if (home := cuda_home(environment, packages)) is not None:
        environment.setdefault("CUDA_HOME", str(home))


def python_header() -> Path | None:
    """Python.h of this interpreter, which Triton's launchers are compiled with; None if it is not installed."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header if header.exists() else None
