"""The loop on one GPU, on the CPU: every step runs but those that only a GPU can take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

pytestmark = pytest.mark.integration
GPU_ONLY = {
    "CUDA graphs",
    "deterministic",
    "overhead",
    "pinned memory",
    "attention",
    "seeded sampling",
}
TAKEN = {
    "server",
    "trainer",
    "publication",
    "sampling",
    "gap",
    "sleep",
    "update",
    "wake",
    "same seeds",
    "exact mode",
}


def states(out: Path) -> dict[str, str]:
    """Returns the state of each step."""
    rows = [line.split(" | ") for line in (out / "loop.md").read_text().splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1] for row in rows[2:]}


def test_the_loop_takes_every_step_on_the_cpu_that_needs_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "loop"
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.loop", "--device", "cpu", "--out", str(out), "--seconds", "1200"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=1300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(out) == dict.fromkeys(TAKEN, "ok") | dict.fromkeys(GPU_ONLY, "left out")
