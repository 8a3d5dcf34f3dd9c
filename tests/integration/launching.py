"""Nodes for tests of scripts/launch, all of which are this machine."""

from __future__ import annotations

from pathlib import Path

from tests.integration.conftest import ROOT


def write_setup(directory: Path, *lines: str) -> Path:
    """A file for SLIMX_NODE_SETUP: node k of a job has the address 127.0.0.(k + 2). `lines` follow."""
    setup = directory / "setup.sh"
    address = "SLIMX_ADDRESS=127.0.0.$((2 + ${NODE_RANK:-${SLURM_PROCID:-0}}))"
    setup.write_text("\n".join([address, f"export PYTHONPATH={ROOT} PYTHONWARNINGS=ignore", *lines, ""]))
    return setup
