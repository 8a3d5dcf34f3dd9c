"""A few steps of a real model on this node: what the plan said of them, and what they took.

    python -m tools.first_hour.runs apart|colocated|resumed --out DIR --model DIR [KEY=VALUE ...]

apart: four ranks train, two servers of two GPUs generate. colocated: all eight do both, in turns. resumed: the same
with checkpoints; the driver is killed, and the run goes on from the newest. The last line has memory of the fullest
trainer rank by phase, measured and planned, and the rate of the last publication.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tools.smoke.training import TrainingRun
from tools.steps import ROOT, Failed

MODES = {
    "apart": (
        "schedule.colocate=false",
        "trainer.world_size=4",
        "trainer.expert=4",
        "rollout.engines=[{count: 2, tensor: 2}]",
    ),
    "colocated": (),
    "resumed": ("checkpoint.every=1", "checkpoint.keep=1"),
}
"""Mode -> overrides of configs/moe/qwen3-30b-a3b.yaml."""
STEPS = 3


def arguments(mode: str, out: Path, model: str, more: list[str]) -> list[str]:
    """Returns the arguments of `slimx train`."""
    return [
        "configs/moe/qwen3-30b-a3b.yaml",
        f"run.name=first-hour-{mode}",
        f"run.dir={out / mode}",
        f"model.path={model}",
        f"rollout.prompts={out / 'task' / 'train.jsonl'}",
        "rollout.prompts_per_step=8",
        "rollout.sampling.max_new_tokens=512",
        f"schedule.steps={STEPS}",
        "checkpoint.every=0",
        "track.tensorboard=false",
        *MODES[mode],
        *more,
    ]


def planned(train_arguments: list[str]) -> dict[str, float]:
    """Returns the planned memory of a trainer's GPU by phase, in GiB."""
    command = [sys.executable, "-m", "slimx.cli", "plan", *train_arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Failed(" ".join((done.stderr or done.stdout).split()[-60:]))
    phases = json.loads(done.stdout)["phases"]
    return {
        phase["phase"]: sum(entry["nbytes"] for entry in phase["held"]) / 2**30
        for phase in phases
        if phase["gpu"] in ("trainer", "shared")
    }


def found(run: TrainingRun, plan: dict[str, float]) -> str:
    """Returns the run's peak memory and publication rate in one line."""
    last = run.rows()[-1]["metrics"]
    measured = {
        name.removeprefix("memory/").removesuffix("_peak_mib"): value / 1024
        for name, value in last.items()
        if name.startswith("memory/") and name.endswith("_peak_mib")
    }
    memory = [
        f"{phase} {gib:.1f}" + (f" of {plan[phase]:.1f} planned" if phase in plan else "")
        for phase, gib in measured.items()
    ]
    seconds = last.get("publish/total_seconds")
    rate = f"{last['publish/mib'] / 1024 / seconds:.2f} GiB/s published" if seconds else "nothing published"
    return f"step {run.step()}; GiB of a trainer: {', '.join(memory) or 'not measured'}; {rate}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    out = options.out.absolute()
    make = [sys.executable, "-m", "slimx.extras.quickstart.make_task", "--out", str(out / "task")]
    subprocess.run(make, cwd=ROOT, check=True, timeout=600)
    train_arguments = arguments(options.mode, out, options.model, options.overrides)
    log = out / f"{options.mode}.train.log"
    run = TrainingRun(out / options.mode, log, train_arguments, options.seconds, os.environ)
    try:
        plan = planned(train_arguments)
        run.start()
        if options.mode == "resumed":
            run.until(lambda: run.step() >= STEPS - 1, f"step {STEPS - 1}")
            run.process.kill()
            run.process.wait()
            run.start()
        if status := run.end():
            raise Failed(f"the run ended with status {status}: {run.log.read_text().strip().splitlines()[-1:]}")
        if options.mode == "resumed" and "resumed at step" not in run.log.read_text():
            raise Failed("the run ended, but did not go on from its checkpoint")
        print(found(run, plan))
    except Failed as error:
        raise SystemExit(str(error)) from None
    finally:
        run.stop()


if __name__ == "__main__":
    main()
