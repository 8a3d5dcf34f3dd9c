"""The first hour on a node of 8 GPUs: one command, one table, and one file to attach to an issue.

    make first-hour MODEL=/models/Qwen3-30B-A3B
    python -m tools.first_hour.check [--model DIR] [--device cuda] [--ranks 8] [--out DIR] [--only NAME ...]

Steps run in the order in which a failure explains later ones. Each is a process of its own with a deadline, and one
that fails does not end the others. Of each it says what is expected and what was found. Without --model the steps that
train a real model are left out. All output stays in DIR. Exits with 1 where a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import slimx
from tools.smoke.training import ROOT

PYTHON = sys.executable


@dataclass(frozen=True)
class Step:
    """One command whose exit status says if it went well, and whose last line says what was found."""

    name: str
    expects: str
    command: tuple[str, ...]
    seconds: float
    """Deadline, for hangs."""
    gpu: bool = True
    """It needs a GPU."""
    model: bool = False
    """It needs a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step."""

    step: Step
    state: Literal["ok", "FAILED", "left out"]
    found: str
    seconds: float = 0.0


def probe(name: str, expects: str, seconds: float = 300, *, gpu: bool = True) -> Step:
    return Step(name, expects, (PYTHON, "-m", "tools.first_hour.probes", name), seconds, gpu=gpu)


def steps(options: argparse.Namespace, out: Path) -> Iterator[Step]:
    """Every step, in order."""
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


def take(step: Step, options: argparse.Namespace, out: Path) -> Outcome:
    """Run one step."""
    if step.gpu and options.device == "cpu":
        return Outcome(step, "left out", "it needs a GPU (--device cpu)")
    if step.model and options.model is None:
        return Outcome(step, "left out", "it needs a checkpoint (--model DIR)")
    if step.model and options.ranks != 8:
        return Outcome(step, "left out", "it is for 8 GPUs (--ranks)")
    print(f"first hour: {step.name}", file=sys.stderr, flush=True)
    began, log = time.monotonic(), out / f"{step.name}.log"
    with log.open("w") as output:
        done = subprocess.Popen(step.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            status = done.wait(step.seconds)
            state, found = "FAILED" if status else "ok", last_line(log) or f"exit status {status}"
        except subprocess.TimeoutExpired:
            state, found = "FAILED", f"not done after {step.seconds:.0f} s; last: {last_line(log)}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has left: ranks, a hung compiler
                os.killpg(done.pid, signal.SIGKILL)
            done.wait()
    return Outcome(step, state, found, time.monotonic() - began)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def page(outcomes: Iterable[Outcome]) -> str:
    """The table to attach to an issue, in Markdown."""
    head = [
        f"slimx {slimx.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}",
        "",
        "| step | state | expected | found | s |",
        "| --- | --- | --- | --- | --- |",
    ]
    cells = (
        (each.step.name, each.state, each.step.expects, each.found.replace("|", "\\|"), f"{each.seconds:.0f}")
        for each in outcomes
    )
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in cells), ""])


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
    outcomes, report = [], out / "first-hour.md"
    for step in every:
        if options.only is None or step.name in options.only:
            outcomes.append(take(step, options, out))
            print(f"{outcomes[-1].state:<8} {step.name:<20} {outcomes[-1].found}", flush=True)
            report.write_text(page(outcomes))
    failed = [each.step.name for each in outcomes if each.state == "FAILED"]
    said = f"{len(failed)} of {len(outcomes)} steps failed: {', '.join(failed)}" if failed else "no step failed"
    print(f"{said}; attach {report} to an issue; the logs are beside it")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
