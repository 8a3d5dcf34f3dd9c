"""The smoke test of a node, on the CPU with two engines: every line of its table, and a line that fails."""

from __future__ import annotations

import os
import re
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


def test_a_check_that_fails_is_named_ends_those_that_need_it_and_is_the_exit_status(tmp_path: Path):
    done = smoke(tmp_path / "smoke", "trainer.pipeline=3")
    assert done.returncode == 1, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    results = [re.split(r"\d s  ", line)[1] for line in lines]
    assert last.startswith("FAILED; ") and str(tmp_path / "smoke") in last
    assert results[0] == results[1] == "ok" and results[10] == "ok"
    assert all(result.startswith("not tried: ") for result in results[3:10])
    # The run's own check and exact mode's, which needs no run: both are told of the layout that cannot be.
    assert all(results[at].startswith("FAILED: slimx: ") and "pipeline" in results[at] for at in (2, 11))
    assert len(results) == 12
    again = smoke(tmp_path / "smoke")
    assert again.returncode == 2 and "exists; remove it" in again.stderr
