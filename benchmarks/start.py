"""Measures the seconds from a command to its first word and first training step: `python benchmarks/start.py [TRL]`.

Compares slimx with TRL, the directory of another set of packages, so that none of them can change what slimx runs with;
without it slimx is measured alone:

    pip install --target build/trl --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 pyarrow==22.0.0 \
        dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 fsspec==2026.9.0 python-dateutil==2.9.0.post0 six==1.17.0

Both train the warm start of `make quickstart`, which must have been run unless --model and --task name others, on the
same prompts: 32 prompts, 8 rollouts of each, one optimizer step. Starts alternate. `first word` is the first output;
`end` is the time of the whole command.
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
MODEL, TASK = ROOT / "runs/quickstart-sft/hf", ROOT / "runs/quickstart-data"
TRAINED = "train.jsonl"
"""File with the prompts, in the directory of the task."""
DEADLINE_S = 600.0
"""Deadline of one start, in seconds."""


@dataclass(slots=True)
class Start:
    """Seconds since the start of the command."""

    word: float
    """First output."""
    step: float
    """End of the first step."""
    end: float
    parts: dict[str, tuple[float, float]]
    """Part -> the seconds at which its start began and ended."""


def measured(argv: list[str], env: dict[str, str], log: Path, done: Callable[[], bool]) -> Start:
    """Runs a command until it ends; returns its times. Raises RuntimeError if it fails."""
    with log.open("wb") as output:
        began, word, step = time.time(), 0.0, 0.0
        process = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | env, cwd=ROOT
        )
        try:
            while process.poll() is None and time.time() < began + DEADLINE_S:
                if not word and log.stat().st_size:
                    word = time.time() - began
                if not step and done():
                    step = time.time() - began
                time.sleep(0.02)
        finally:
            process.terminate()
            status = process.wait(60)
    if status or not step:
        raise RuntimeError(f"{argv} ended with status {status}; its output is in {log}")
    return Start(word, step, time.time() - began, {})


def start_slimx(directory: Path, model: Path, task: Path) -> Start:
    run = directory / "run"
    files = {
        "run.dir": run,
        "model.path": model,
        "trainer.load": model,
        "rollout.prompts": task / TRAINED,
        "eval.prompts": task / "heldout.jsonl",
    }
    overrides = [f"{key}={path}" for key, path in files.items()]
    overrides += ["schedule.steps=1", "eval.every=1000", "checkpoint.every=1000", "track.report=false"]
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


def start_trl(directory: Path, model: Path, task: Path, packages: Path) -> Start:
    log = directory / "trl.log"
    argv = [sys.executable, "benchmarks/start_trl.py", *map(str, (model, task / TRAINED, directory / "trl"))]
    env = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    return measured(argv, env, log, lambda: log.exists() and "step 1" in log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path, nargs="?", help="directory of TRL and the packages that it needs")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--task", type=Path, default=TASK, help="directory of the prompts")
    parser.add_argument("--pairs", type=positive, default=4)
    options = parser.parse_args()
    model, task = options.model.resolve(), options.task.resolve()
    if missing := [str(path) for path in (model, task) if not path.is_dir()]:
        parser.error(f"{' and '.join(missing)} cannot be found: run `make quickstart` first")
    if options.trl is not None and not (options.trl / "trl").is_dir():
        parser.error(f"{options.trl} has no directory trl: install TRL as the head of {Path(__file__).name} says")
    starts: dict[str, list[Start]] = {"slimx": [], "TRL": []}
    clock, others = time.time(), cpu_seconds()
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as directory:
            starts["slimx"].append(start_slimx(Path(directory), model, task))
            if options.trl is not None:
                starts["TRL"].append(start_trl(Path(directory), model, task, options.trl.resolve()))
    others = (cpu_seconds() - others) / (time.time() - clock)
    print(surroundings("torch", "megatron-core", "sglang", "ray"))
    print(f"medians of {options.pairs} pairs; what is no child of this process, as Ray's, used {others:.2f} cores")
    print(f"{'':24}{'begins s':>10}{'done s':>10}")
    for name in starts["slimx"][0].parts:
        begins, ends = (median(one.parts[name][side] for one in starts["slimx"]) for side in (0, 1))
        print(f"slimx {name:18}{begins:10.1f}{ends:10.1f}")
    for name, several in starts.items():
        if several:
            print(f"{name + ' first word':24}{'':10}{median(one.word for one in several):10.1f}")
            print(f"{name + ' first step':24}{'':10}{median(one.step for one in several):10.1f}")
            print(f"{name + ' end':24}{'':10}{median(one.end for one in several):10.1f}")
    if starts["TRL"]:
        ratios = sorted(ours.step / theirs.step for ours, theirs in zip(*starts.values(), strict=True))
        print(f"slimx / TRL, first step: {median(ratios):.2f}, range {ratios[0]:.2f} to {ratios[-1]:.2f}")


if __name__ == "__main__":
    main()
