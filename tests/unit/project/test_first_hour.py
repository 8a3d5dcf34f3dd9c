"""The first hour on GPUs, without any: its steps can be started, and one that fails or hangs ends no other."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.extras.planner.plan.report import plan_report
from tools.first_hour import runs
from tools.first_hour.check import Step, steps, work
from tools.first_hour.probes import PROBES
from tools.smoke.check import Smoke, parse
from tools.steps import ROOT, Failed, LeftOut


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"device": "cuda", "model": Path("models/Qwen3-30B-A3B"), "ranks": 8, **changes})


def step(program: str, name: str = "one", seconds: float = 60, **needs: bool) -> Step:
    return Step(name, "all is well", (sys.executable, "-c", program), seconds, **needs)


def test_the_last_line_of_a_step_is_its_finding(tmp_path: Path) -> None:
    assert work(step("print('first'); print('32 | 48')"), options(), tmp_path) == "32 | 48"


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="no NVLink"):
        work(step("raise SystemExit('no NVLink')"), options(), tmp_path)


def test_a_step_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with pytest.raises(Failed, match="3 s"):
        work(step(child, seconds=3), options(), tmp_path)
    left = subprocess.run(
        ["ps", "-o", "stat=", "-p", (tmp_path / "one.log").read_text()], capture_output=True, text=True
    )
    assert left.stdout.strip()[:1] in ("", "Z")


@pytest.mark.parametrize(
    ("needs", "changes"),
    [({"gpu": True}, {"device": "cpu"}), ({"model": True}, {"model": None}), ({"model": True}, {"ranks": 4})],
)
def test_checks_that_the_machine_cannot_run_are_left_out_and_reported(
    tmp_path: Path, needs: dict, changes: dict
) -> None:
    with pytest.raises(LeftOut):
        work(step("raise SystemExit(1)", **needs), options(**changes), tmp_path)


def test_every_probe_is_a_step(tmp_path: Path) -> None:
    probes = [item.command[-1] for item in steps(options(), tmp_path) if "tools.first_hour.probes" in item.command]
    assert sorted(probes) == sorted(PROBES)


@pytest.mark.parametrize("mode", runs.MODES)
def test_the_runs_of_a_real_model_fit_the_gpus_that_they_are_for(mode: str, tmp_path: Path) -> None:
    file, *overrides = runs.arguments(mode, tmp_path, str(ROOT / "configs/moe/models/Qwen3-30B-A3B"), [])
    config = load_config(ROOT / file, overrides)
    assert config.cluster.gpu == "h100"
    assert plan_report(config).report.violations == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_smoke_test_starts_a_run_that_is_valid(device: str, tmp_path: Path) -> None:
    options = parse(["--device", device, "--out", str(tmp_path)])
    file, *overrides = Smoke(options).arguments()
    assert load_config(ROOT / file, overrides).run.name == "smoke"
