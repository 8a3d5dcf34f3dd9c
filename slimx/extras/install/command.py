"""The command `slimx setup`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from slimx.commands.options import Debug
from slimx.errors import SlimxError
from slimx.extras.install.packages import LOCKS, TORCH_CPU_INDEX, Installation, cpu_index, install, stamp
from slimx.observability.live.safe_text import visible
from slimx.runtime.children import python_argv
from slimx.runtime.toolkit import cuda_home

app = typer.Typer(add_completion=False)

VERSION = (3, 12)
"""Version of Python for which the locks are."""
CPU_GB, CUDA_GB = 3, 7
"""Disk space that the packages take, with a CPU and with a CUDA build of torch."""


@app.command()
def setup(
    lock: Annotated[Literal["cpu", "cu130"], typer.Option(help="Packages for CPUs, or for CUDA 13.0.")] = "cpu",
    torch_index: Annotated[str, typer.Option(help="Package index that torch comes from, without a fallback.")] = "",
    torch_cpu_index: Annotated[
        str, typer.Option(help="Package index of torch's CPU builds, tried first on a machine without a GPU.")
    ] = TORCH_CPU_INDEX,
    system: Annotated[bool, typer.Option("--system", help="Install outside of a virtual environment.")] = False,
    debug: Debug = False,
) -> None:
    """Install torch, megatron-core, SGLang, Ray and the other packages of a lock file into this environment, then run
    `slimx doctor`. Can be repeated."""
    installation = Installation(lock, LOCKS / f"{lock}.txt", torch_index, torch_cpu_index)
    check(installation, system=system)
    minutes = "2 minutes"
    if lock != "cpu":
        minutes = "an hour, because Transformer Engine is compiled"
    size = f"{_size_gb(installation)} GB of disk space"
    print(visible(f"installing the lock {lock} into {sys.prefix}: about {minutes} and {size}"), flush=True)
    try:
        install(installation)
    except subprocess.CalledProcessError as error:
        raise SlimxError(
            f"pip could not install the lock {lock} (exit status {error.returncode}, its messages are above); correct "
            "the cause and repeat `slimx setup`",
            code="setup.pip",
            about=lock,
        ) from None
    status = subprocess.run(python_argv("slimx", "doctor")).returncode
    if status:
        raise typer.Exit(status)


def check(installation: Installation, *, system: bool) -> None:
    """Raises SlimxError if the lock file cannot be installed into the environment of this Python. `system`: True to
    accept an environment that is not virtual."""
    lock = installation.lock
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info[:2] != VERSION:
        raise SlimxError(
            f"slimx setup installs packages for Python 3.12, not {version}; make an environment with `python3.12 -m "
            "venv .venv` and install slimx there",
            code="setup.python",
            about=version,
        )
    if sys.prefix == sys.base_prefix and not system:
        raise SlimxError(
            f"{sys.prefix} is not a virtual environment, and slimx setup would replace packages of other programs; "
            "make one with `python3.12 -m venv .venv` and install slimx there, or add --system",
            code="setup.environment",
            about=sys.prefix,
        )
    for other in Path(sys.prefix).glob(".installed-*"):
        if other != stamp(lock):
            name = other.name.removeprefix(".installed-")
            raise SlimxError(
                f"{sys.prefix} contains the packages of the lock {name}, whose build of torch is not that of the lock "
                f"{lock}; make a new environment, or use --lock {name}",
                code="setup.other_lock",
                about=name,
            )
    if lock != "cpu" and cuda_home(os.environ) is None:
        raise SlimxError(
            f"slimx setup --lock {lock} compiles Transformer Engine, and there is no CUDA toolkit; install CUDA "
            "13.0, or set CUDA_HOME to its directory",
            code="setup.cuda_home",
            about="CUDA_HOME",
        )
    if importlib.util.find_spec("pip") is None:
        raise SlimxError(
            f"{sys.executable} has no pip, with which slimx setup installs; run `{sys.executable} -m ensurepip`",
            code="setup.no_pip",
            about="pip",
        )
    needed = _size_gb(installation)
    free = shutil.disk_usage(sys.prefix).free / 1e9
    if free < needed and not stamp(lock).exists():
        raise SlimxError(
            f"{sys.prefix} has {free:.1f} GB of free disk space, but the lock {lock} needs {needed} GB; free "
            "disk space, or make the environment on another disk",
            code="setup.disk",
            about=sys.prefix,
        )


def _size_gb(installation: Installation) -> int:
    """Returns the disk space that the packages take, in GB, if the index of CPU builds can be reached."""
    if cpu_index(installation):
        return CPU_GB
    return CUDA_GB
