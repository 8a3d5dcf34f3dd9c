"""The first hour on a node of 8 GPUs: one command, one table, and one file to attach to an issue.

    make first-hour MODEL=/models/Qwen3-30B-A3B
    python -m tools.first_hour.check [--model DIR] [--device cuda] [--ranks 8] [--out DIR] [--only NAME ...]

Steps run in an order in which a failure explains later ones. Each runs in a new process with a deadline, and a failed
step does not end the others. The table has the expectation and the finding of each. Without --model the steps that
train a real model are left out. All output stays in DIR. Exits with status 1 if a step failed.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import slimx
from tools.steps import LeftOut, Steps, run_command

PYTHON = sys.executable


@dataclass(frozen=True)
class Step:
    """A command whose exit status tells whether the step passed, and whose last line of output is the finding."""

    name: str
    expects: str
    command: tuple[str, ...]
    seconds: float
    """Deadline in seconds, which ends a hanging step."""
    gpu: bool = True
    """True if the step needs a GPU."""
    model: bool = False
    """True if the step needs a checkpoint."""


def probe(name: str, expects: str, seconds: float = 300, *, gpu: bool = True) -> Step:
    return Step(name, expects, (PYTHON, "-m", "tools.first_hour.probes", name), seconds, gpu=gpu)


def steps(options: argparse.Namespace, out: Path) -> Iterator[Step]:
    """Yields every step, in order."""
    cuda = options.device == "cuda"
    yield probe("topology", "NVLink between all GPUs of the node")
    yield probe("versions", "every package as the lock pins it", gpu=False)
    yield Step("doctor", "nothing is missing", (PYTHON, "-m", "slimx.cli", "doctor"), 600, gpu=False)
    yield probe("transformer_engine", "a layer computes what torch does")
    for kind in ("flash", "fused", "unfused"):
        yield probe(f"attention_{kind}", "packed sequences as torch computes them")
    yield probe("deep_gemm", "a kernel is compiled and multiplies right", 900)
    yield probe("deep_ep", "it can be imported")
    yield probe("memory_saver", "4 GiB come free and are taken again")
    yield Step("kernels", "tests/gpu pass; figures of pack and trainer", ("make", "gpu", f"OUT={out / 'gpu'}"), 900)
    ranks, kind = str(options.ranks), ["--device", options.device]
    reduce = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "-m", "tools.first_hour.all_reduce")
    small = [] if cuda else ["--mib", "16"]
    yield Step("all_reduce", "350 GB/s and more over 8 H100 by NVLink", (*reduce, *kind, *small), 300, gpu=False)
    half = str(max(1, options.ranks // 2))
    smoke = ("scripts/launch/smoke_8gpu.sh", *kind, "--trainers", half, "--engines", half, "--out", str(out / "smoke"))
    yield Step("smoke", "a tiny run, an engine killed, a resume, exact mode: all is well", smoke, 3600, gpu=False)
    for mode, expects in (
        ("apart", "three steps; memory below the plan's"),
        ("colocated", "engines and trainers take turns; memory below the plan's"),
        ("resumed", "a killed driver's run goes on from its checkpoint; 0.9 TB of disk"),
    ):
        command = (PYTHON, "-m", "tools.first_hour.runs", mode, "--out", str(out), "--model", str(options.model))
        yield Step(mode, expects, command, 3600, model=True)


def work(step: Step, options: argparse.Namespace, out: Path) -> str:
    """Runs one step; returns its finding."""
    if step.gpu and options.device == "cpu":
        raise LeftOut("it needs a GPU (--device cpu)")
    if step.model and options.model is None:
        raise LeftOut("it needs a checkpoint (--model DIR)")
    if step.model and options.ranks != 8:
        raise LeftOut("it is for 8 GPUs (--ranks)")
    return run_command(step.command, out / f"{step.name}.log", step.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory of Qwen3-30B-A3B [no real model is trained]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=8, help="GPUs of the node [8]")
    parser.add_argument("--out", type=Path, default=Path("runs/first-hour"), help="new directory [runs/first-hour]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps and no other")
    options = parser.parse_args()
    out = options.out.absolute()
    every = [*steps(options, out)]
    names = [step.name for step in every]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"--only {unknown[0]}: no such step; there are {', '.join(names)}")
    if out.exists():
        parser.error(f"{out} exists; remove it or choose another --out")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: it has no config.json")
    out.mkdir(parents=True)
    title = f"slimx {slimx.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    taken = Steps(title, out / "first-hour.md")
    for step in every:
        if options.only is None or step.name in options.only:
            taken.take(step.name, partial(work, step, options, out), expected=step.expects)
    print(f"{taken.summary()}; attach {taken.path} to an issue; the logs are in the same directory")
    return int(bool(taken.failed))


if __name__ == "__main__":
    sys.exit(main())
