"""The smoke test of a node, on the CPU with two engines: every line of its table, and a line that fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT
from tests.warm.interpreter import interpreter

pytestmark = pytest.mark.integration
CPU = ("--device", "cpu", "--trainers", "2", "--engines", "2")


def smoke(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The script's `python` is a fork of the warm process.
    path = os.pathsep.join((str(interpreter().parent), os.environ["PATH"]))
    return subprocess.run(
        ["scripts/launch/smoke_8gpu.sh", *CPU, "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PATH": path},
        capture_output=True,
        text=True,
        timeout=850,
    )


def outcomes(out: Path) -> dict[str, tuple[str, str]]:
    """Returns state and finding of each step, in order."""
    rows = [line.split(" | ") for line in (out / "smoke.md").read_text().splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): (row[1], row[3]) for row in rows[2:]}


@pytest.mark.slow("a whole smoke test")
def test_a_sound_node_passes_every_check(tmp_path: Path):
    done = smoke(tmp_path / "smoke", "rollout.prompts_per_step=8", "rollout.group_size=4")
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(tmp_path / "smoke")
    assert len(found) == 12 and {state for state, _ in found.values()} == {"ok"}
    assert "2 engines" in found["publications are verified"][1]


def test_a_failed_check_skips_its_dependents_and_is_the_exit_status(tmp_path: Path):
    done = smoke(tmp_path / "smoke", "trainer.pipeline=3")
    assert done.returncode == 1, done.stdout + done.stderr
    states, findings = zip(*outcomes(tmp_path / "smoke").values(), strict=True)
    # The run's check and exact mode's, which needs no run, refuse the layout; what needs the run is left out.
    assert states == ("ok", "ok", "FAILED", *["left out"] * 7, "ok", "FAILED")
    assert all("pipeline" in findings[index] for index in (2, 11))
    again = smoke(tmp_path / "smoke")
    assert again.returncode == 2 and "exists; remove it" in again.stderr
