"""A small soak: random kills, and every prompt is accounted for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT
from tools.soak.accounts import Ledger

pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run of 60 steps"), pytest.mark.timeout(3600)]

STEPS = 60


def test_a_short_soak_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    # Nothing but leaps shows in so few steps: growth is for hours.
    small = ["--steps", STEPS, "--strike-every", 8, "--save-every", 10, "--warm", 20, "--sample-seconds", 1]
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--out", str(tmp_path), "--seed", "3", *map(str, small)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    output = done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED") and " grows " not in line]
    assert not failed and done.returncode in (0, 1), output
    account = Ledger(tmp_path / "run").account()
    assert account.step == STEPS and not account.problems, output
    assert account.trained == 2 * STEPS and account.dropped["filter: unlucky"], output
    strikes = (tmp_path / "strikes.jsonl").read_text().splitlines()
    assert len(strikes) >= 2, output
    assert (tmp_path / "samples.jsonl").stat().st_size
