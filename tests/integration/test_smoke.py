"""The smoke test of a node, on the CPU with two engines: every line of its table, and a line that fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

pytestmark = pytest.mark.integration
CPU = ("--device", "cpu", "--trainers", "2", "--engines", "2")


def smoke(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/launch/smoke_8gpu.sh", *CPU, "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=850,
    )


@pytest.mark.slow
def test_a_sound_node_passes_every_check(tmp_path: Path):
    done = smoke(tmp_path / "smoke", "rollout.prompts_per_step=8", "rollout.group_size=4")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 13 and lines[-1].startswith("all is well") and "FAILED" not in done.stdout
    assert "2 engines" in next(line for line in lines if line.startswith("publications are verified"))


def test_a_check_that_fails_is_named_ends_the_rest_and_is_the_exit_status(tmp_path: Path):
    done = smoke(tmp_path / "smoke", "trainer.pipeline=3")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "FAILED: slimx: " in lines[2] and "pipeline" in lines[2]
    assert len(lines) == 4 and lines[3].startswith("FAILED; ") and str(tmp_path / "smoke") in lines[3]
    again = smoke(tmp_path / "smoke")
    assert again.returncode == 2 and "exists; remove it" in again.stderr
