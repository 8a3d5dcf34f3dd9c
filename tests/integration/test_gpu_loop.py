"""The loop on one GPU and `make gpu`, on the CPU: every step but those that only a GPU can take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT
from tests.warm.interpreter import interpreter

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


def states(table: Path) -> dict[str, str]:
    """Returns the state of each step."""
    rows = [line.split(" | ") for line in table.read_text().splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1] for row in rows[2:]}


@pytest.mark.costly("an SGLang server and a trainer")
@pytest.mark.parametrize(
    "left_out",
    [{"exact mode"}, pytest.param(set(), marks=pytest.mark.slow("starts another pair; test_run_deepseek is exact"))],
    ids=["fast", "all"],
)
def test_the_loop_takes_every_step_on_the_cpu_that_needs_no_gpu(left_out: set[str], tmp_path: Path) -> None:
    out = tmp_path / "loop"
    steps = (TAKEN | GPU_ONLY) - left_out
    done = subprocess.run(
        [
            interpreter(),
            "-m",
            "tools.gpu.loop",
            "--device",
            "cpu",
            "--out",
            str(out),
            "--seconds",
            "1200",
            "--only",
            *steps,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=1300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = dict.fromkeys(TAKEN, "ok") | dict.fromkeys(GPU_ONLY, "left out")
    assert states(out / "loop.md") == {name: state for name, state in expected.items() if name in steps}


TESTS = {"tests of trainer", "tests of exact_trainer"}
STARTS = {"collection", "start of reshard_cuda", "start of exact_cuda", "start of trainer_cuda"}


@pytest.mark.parametrize(
    "steps",
    [
        {"start of exact_cuda"},
        pytest.param(TESTS | STARTS, marks=pytest.mark.slow("tests in tests; test_gpu_check collects")),
    ],
    ids=["some", "all"],
)
def test_make_gpu_takes_every_step_of_a_dry_run(steps: set[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.check", "--dry-run", "--out", str(tmp_path / "gpu"), "--only", *steps],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=1300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = states(tmp_path / "gpu" / "check.md")
    assert {name for name, state in found.items() if state == "ok"} >= steps
    assert "FAILED" not in found.values()


def test_the_loop_removes_no_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    command = [sys.executable, "-m", "tools.gpu.loop", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and str(tmp_path) in done.stderr
    assert (tmp_path / "mine").exists()


@pytest.mark.slow("imports trainer and engine for a wrong word")
def test_a_step_that_the_loop_does_not_have_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu.loop", "--device", "cpu", "--out", str(tmp_path / "loop")]
    done = subprocess.run([*command, "--only", "no-such"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no-such" in done.stderr
