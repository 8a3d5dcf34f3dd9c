"""Seconds of each part of a recovery of lost trainers, with a model whose state takes time to load.

    python benchmarks/recovery.py [--hidden 640] [--layers 8] [--json FILE]

A run with the real parts (Ray, two megatron-core ranks, one SGLang engine, sglang-router) loses rank 1 (SIGKILL, as a
training step begins) twice: once where mirrors in host memory hold the newest state, once after those are killed, too,
so that the newest checkpoint is loaded from the disk. The model is a random Qwen3-MoE with the quickstart's tokenizer.

    killed --detected--> --processes, imports, rendezvous, model--> --state--> --steps again--> --the step, publication,
                                                                                             record--> next step

The ranks and the driver measure the parts, and the run prints them when trainers are running again. "Loading" is the
part that remains however fast processes start: the model with its weights, and the state.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from machine import surroundings
from quantities import positive

ROOT = Path(__file__).resolve().parents[1]
MAKER = ROOT / "slimx/extras/quickstart/make_model.py"
TASK = ROOT / "slimx/extras/quickstart/make_task.py"
DEADLINE_S = 1800.0
MIRROR_EVERY, SAVE_EVERY, STEPS = 2, 5, 40
NOTE = re.compile(
    r"trainers are running again after step (?P<step>\d+): started in (?P<start>[\d.]+) s "
    r"\(processes (?P<processes>[\d.]+), imports (?P<imports>[\d.]+), rendezvous (?P<rendezvous>[\d.]+), "
    r"model (?P<model>[\d.]+)\), loaded (?P<source>.+?) in "
    r"(?P<state>[\d.]+) s, trained (?P<steps>\d+) steps? again in (?P<again>[\d.]+) s"
)


def make_model(out: Path, hidden: int, layers: int) -> int:
    """Writes a random Qwen3-MoE of 16 experts, float32, with the quickstart's tokenizer; returns its number of
    parameters."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    maker = runpy.run_path(str(MAKER))
    wide = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "moe_intermediate_size": 384,
        "intermediate_size": hidden,
        "initializer_range": 0.02,
    }
    config = maker["CONFIG"] | wide
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).to(torch.float32)
    model.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    maker["make_tokenizer"]().save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def write_config(directory: Path, model: Path) -> Path:
    runpy.run_path(str(TASK))["make_task"](directory / "task", seed=1)
    config = {
        "run": {"name": "recovery", "dir": str(directory / "run")},
        "model": {"path": str(model)},
        "numerics": {"dtype": "float32"},
        "cluster": {"start_deadline": DEADLINE_S},
        "recovery": {"trainers": 5, "mirror_every": MIRROR_EVERY},
        "checkpoint": {"every": SAVE_EVERY, "keep": 1, "export_hf": False},
        "trainer": {
            "world_size": 2,
            "expert": 2,
            "deadline": DEADLINE_S,
            "watch_deadline": 120,
            "optimizer": {"lr": 1e-4},
        },
        "rollout": {
            "prompts": str(directory / "task/train.jsonl"),
            "prompts_per_step": 2,
            "group_size": 2,
            "max_prompt_tokens": 64,
            "engines": [{"name": "actor", "max_total_tokens": 2048}],
            "sampling": {"max_new_tokens": 4},
        },
        "reward": {"function": "loop_hooks.reward"},
        "schedule": {"steps": STEPS, "step_deadline": DEADLINE_S},
        "track": {"report": False, "tensorboard": False},
    }
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


class Struck:
    """A running run, its files and its processes."""

    def __init__(self, directory: Path, config: Path):
        self.directory, self.output = directory / "run", directory / "out.log"
        variables = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "4000", "PYTHONPATH": str(ROOT / "benchmarks")}
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slimx.cli", "train", str(config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                cwd=ROOT,
            )

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.directory / name
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the run ended or stalled:\n{self.output.read_text()}")
            time.sleep(0.02)

    def kill(self, name: str, log: str) -> None:
        """Kills the process called `name` that prints to the file `log` of the run."""
        printed = str((self.directory / "logs" / log).resolve())
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):  # another user's, or ended
                shown = process.name() + " ".join(process.cmdline())
                if os.readlink(f"/proc/{process.pid}/fd/1") == printed and name in shown:
                    process.send_signal(signal.SIGKILL)
                    return
        raise RuntimeError(f"no {name} prints to {printed}")

    def strike(self) -> dict[str, Any]:
        """Kills rank 1 when the next training step begins; returns the parts of the recovery, in seconds."""
        seen, notes = len(self.rows("timeline.jsonl")), len(NOTE.findall(self.output.read_text()))
        self.until(lambda: any(_is(row, "prepare") for row in self.rows("timeline.jsonl")[seen:]))
        at, steps = time.time(), len(self.rows("metrics.jsonl"))
        self.kill("ray::TrainerWorker", "trainer-1.log")
        self.until(lambda: len(self.rows("metrics.jsonl")) > steps)
        total = time.time() - at
        self.until(lambda: len(NOTE.findall(self.output.read_text())) > notes)
        found = list(NOTE.finditer(self.output.read_text()))[notes].groupdict()
        parts = {name: value if name == "source" else float(value) for name, value in found.items()}
        after = [row for row in self.rows("timeline.jsonl") if row["start"] > at - 1]
        (restart,) = [row for row in after if row["track"] == "trainers" and row["name"] == "restart"]
        publications = [row["seconds"] for row in after if _is(row, "publish")]
        publish, noticed = publications[0], restart["start"] - at
        loading = parts["model"] + parts["state"]
        rest = total - noticed - restart["seconds"] - publish
        parts |= {"noticed": noticed, "replaced": restart["seconds"], "publish": publish, "step": rest}
        return parts | {"total": total, "loading": loading, "ratio": total / loading, "load": os.getloadavg()[0]}


def _is(row: dict[str, Any], phase: str) -> bool:
    return row["track"] == "main" and row["name"] == phase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=positive, default=640)
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = make_model(directory / "model", options.hidden, options.layers)
        run = Struck(directory, write_config(directory, directory / "model"))
        try:
            run.until(lambda: any("recovery/mirrored_step" in row["metrics"] for row in run.rows("metrics.jsonl")))
            strikes = [run.strike()]
            run.until(lambda: any(row["track"] == "checkpoint" for row in run.rows("timeline.jsonl")))
            run.kill("ray::MirrorStore", "mirrors-0.log")
            strikes.append(run.strike())
        finally:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(DEADLINE_S)
    print(surroundings("torch", "megatron-core", "sglang", "ray"))
    print(f"{parameters / 1e6:.0f} M parameters, float32, 2 ranks")
    for strike in strikes:
        print(" ".join(f"{name}={value if name == 'source' else round(value, 2)}" for name, value in strike.items()))
    if options.json:
        options.json.write_text(json.dumps({"parameters": parameters, "strikes": strikes}, indent=1))


if __name__ == "__main__":
    main()
