"""Seconds from a command to its first finished training step, for slimx and for TRL: `python benchmarks/start.py TRL`.

TRL is the directory of another set of packages, so that none of them can change what slimx runs with:

    pip install --target build/trl --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 pyarrow==22.0.0 \
        dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 fsspec==2026.9.0 python-dateutil==2.9.0.post0 six==1.17.0

Both train the warm start of `make quickstart`, which must have been run, on the same prompts: 32 prompts, 8 rollouts of
each, one optimizer step. Starts alternate. `end` is the time of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from machine import cpu_seconds, surroundings
from quantities import positive

ROOT = Path(__file__).resolve().parents[1]
MODEL, PROMPTS = ROOT / "runs/quickstart-sft/hf", ROOT / "runs/quickstart-data/train.jsonl"
DEADLINE_S = 600.0
"""For one start."""


@dataclass(slots=True)
class Start:
    """Seconds since the command began."""

    step: float
    """Until its first step was done."""
    end: float
    parts: dict[str, tuple[float, float]]
    """When each part began to start, and when it had started."""


def measured(argv: list[str], env: dict[str, str], log: Path, done: Callable[[], bool]) -> Start:
    """Run a command until it ends; raises RuntimeError if it fails."""
    with log.open("wb") as output:
        began, step = time.time(), 0.0
        process = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | env, cwd=ROOT
        )
        try:
            while process.poll() is None and time.time() < began + DEADLINE_S:
                if not step and done():
                    step = time.time() - began
                time.sleep(0.02)
        finally:
            process.terminate()
            status = process.wait(60)
    if status or not step:
        raise RuntimeError(f"{argv} ended with status {status}; its output is in {log}")
    return Start(step, time.time() - began, {})


def start_slimx(directory: Path) -> Start:
    run = directory / "run"
    overrides = [f"run.dir={run}", "schedule.steps=1", "eval.every=1000", "checkpoint.every=1000", "track.report=false"]
    metrics = run / "metrics.jsonl"

    def done() -> bool:
        return metrics.exists() and any(json.loads(line)["step"] for line in metrics.read_text().splitlines())

    began = time.time()
    argv = [sys.executable, "-m", "slimx.cli", "train", "configs/moe/quickstart.yaml", *overrides]
    start = measured(argv, {}, directory / "slimx.log", done)
    for line in (run / "timeline.jsonl").read_text().splitlines():
        phase = json.loads(line)
        if phase["name"] == "start" or (phase["name"] == "publish" and phase["step"] == 0):
            name = phase["track"] if phase["name"] == "start" else "first publication"
            start.parts[name] = phase["start"] - began, phase["start"] + phase["seconds"] - began
    return start


def start_trl(packages: Path, directory: Path) -> Start:
    log = directory / "trl.log"
    argv = [sys.executable, "benchmarks/start_trl.py", str(MODEL), str(PROMPTS), str(directory / "trl")]
    env = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    return measured(argv, env, log, lambda: log.exists() and "step 1" in log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path, help="directory of TRL and the packages that it needs")
    parser.add_argument("--pairs", type=positive, default=4)
    options = parser.parse_args()
    if not MODEL.is_dir():
        parser.error(f"{MODEL} is missing: run `make quickstart` first")
    if not (options.trl / "trl").is_dir():
        parser.error(f"{options.trl} holds no trl: install it as the head of {Path(__file__).name} says")
    slimx, trl = [], []
    clock, others = time.time(), cpu_seconds()
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as directory:
            slimx.append(start_slimx(Path(directory)))
            trl.append(start_trl(options.trl, Path(directory)))
    others = (cpu_seconds() - others) / (time.time() - clock)
    print(surroundings("torch", "megatron-core", "sglang", "ray"))
    print(f"medians of {options.pairs} pairs; what is no child of this process, as Ray's own, used {others:.2f} cores")
    print(f"{'':24}{'begins s':>10}{'done s':>10}")
    for name in slimx[0].parts:
        begins, ends = (median(one.parts[name][side] for one in slimx) for side in (0, 1))
        print(f"slimx {name:18}{begins:10.1f}{ends:10.1f}")
    for name, starts in (("slimx", slimx), ("TRL", trl)):
        print(f"{name + ' first step':24}{'':10}{median(one.step for one in starts):10.1f}")
        print(f"{name + ' end':24}{'':10}{median(one.end for one in starts):10.1f}")
    ratios = sorted(ours.step / theirs.step for ours, theirs in zip(slimx, trl, strict=True))
    print(f"slimx / TRL, first step: {median(ratios):.2f}, range {ratios[0]:.2f} to {ratios[-1]:.2f}")


if __name__ == "__main__":
    main()
