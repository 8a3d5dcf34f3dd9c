"""Environment of the machine on which an archive is made: versions, devices and settings, but no name of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import slimx
from slimx.extras.doctor.machine import Finding, devices, machine

SETTINGS = (
    "CUDA",
    "FLASHINFER",
    "GLOO",
    "HF",
    "MASTER",
    "NCCL",
    "NIXL",
    "NVIDIA",
    "OMP",
    "PYTORCH",
    "RAY",
    "SGL",
    "SLIMX",
)
"""Beginnings of the names of environment variables that the archive contains, in addition to `ALSO`."""
ALSO = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "SLURM_JOB_NUM_NODES",
    "TMPDIR",
    "TORCH_CUDA_ARCH_LIST",
    "UCX_TLS",
)
GIT_S = 10
"""Time limit in seconds for git."""


def environment_lines(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields lines about this machine, which may be another one than the run's: system, devices, the commit of slimx if
    it is a checkout, settings among the variables of `environment`, and all packages."""
    yield "This is the machine on which slimx pack ran; it may be another one than that of the run."
    yield f"system: {_system()}, kernel {platform.release()}, {platform.machine()}"
    for look in (machine, devices):
        for finding in look():
            yield _line(finding)
    yield f"commit: {_commit()}"
    yield ""
    for name in sorted(environment):
        if name in ALSO or name.partition("_")[0] in SETTINGS:
            yield f"{name}={environment[name]}"
    yield ""
    versions = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    for name, version in sorted(versions.items()):
        yield f"{name}=={version}"


def _line(finding: Finding) -> str:
    line = f"{finding.name}: {finding.text}"
    if finding.problem is not None:
        line += f" ({finding.problem})"
    return line


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (KeyError, OSError):
        return platform.system()


def _commit() -> str:
    """Returns the commit of slimx's checkout, and the number of its changed files; "none" outside a checkout."""
    root = Path(slimx.__file__).parents[1]
    if not (root / ".git").exists():
        return "none"
    out = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                timeout=GIT_S,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unknown ({type(error).__name__})"
        if done.returncode != 0:
            return f"unknown (git exits with {done.returncode})"
        out.append(done.stdout)
    return f"{out[0].strip()}, {len(out[1].splitlines())} changed files"
