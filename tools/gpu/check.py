"""Builds the kernels, tests them and the trainer on this machine's GPU and measures them: `make gpu`.

    python -m tools.gpu.check [--out DIR] [--seconds 450] [--quick | --loop | --dry-run [--only STEP ...]]

Needs numpy, torch, pytest and setuptools, and nvcc unless the libraries in slimx/_lib are up to date; nothing else of
slimx and no network. The trainer needs more, as benchmarks and some tests do: installed, or in build/gpu-wheels (`make
gpu-wheels`, where there is a network), which is unpacked for all steps; without either they are left out.

--quick: what shows most in 120 s. --loop: a trainer and a server on one GPU (tools/gpu/loop.py), 360 s. --dry-run: what
can be shown without a GPU. Into DIR go check.md (the
table), output.txt (all that the steps print) and triton_scales.npy: the table for the rule triton on the CPU, to be
stored in slimx/reshard/kernels. Every step has its deadline, and one that fails ends no other. Exits with 1 where
anything failed, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from tools.gpu.library import has_nvcc, up_to_date
from tools.gpu.server_arguments import VARIABLES
from tools.gpu.unpack import MANIFEST
from tools.steps import ROOT, Failed, LeftOut, Steps, run_command

PYTHON = sys.executable
PACKAGES = ROOT / "build" / "gpu-wheels"
"""Folder of the packages that tools/gpu/wheels.py collects."""
KERNELS = ROOT / "build" / "gpu-kernels"
"""Cache of the kernels that SGLang compiles at run time."""
STAND_INS = ROOT / "tools" / "gpu" / "stand_ins"
NEEDED = ("numpy", "torch", "pytest", "setuptools")
"""Packages without which nothing runs."""
TRAINERS = ("trainer", "exact_trainer")
"""Tests of which a half runs without a GPU."""
FIRST = ("errors", "pack", "numerics", "sharing", *TRAINERS)
LAST = ("sanitizer",)
"""It is slow, and matters only where the rest passes."""
QUICK = ("errors", "pack", "numerics", "sharing", "trainer")
QUICK_TRAINER = ("-k", "qwen and not bf16")
"""Log-probs, gradients, losses, weights and a checkpoint in fp32, against the CPU: one model, two processes."""
PYTEST = (PYTHON, "-m", "pytest", "-q", "-rs", "--maxfail=8", "-p", "no:cacheprovider")
LIBRARY, MACHINE, UNPACK = "library", "machine", "packages"
TAIL = 3000
"""Characters of a failed step's output that are printed."""


@dataclass(frozen=True)
class Step:
    """A command, the seconds that it has, the steps that it needs, and why it cannot be taken here, if so."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    left_out: str | None = None


def test_names(root: Path = ROOT) -> list[str]:
    """Returns the names of all test files in tests/gpu, without `test_`, in the order in which they run."""
    found = {path.stem.removeprefix("test_") for path in (root / "tests" / "gpu").glob("test_*.py")}
    middle = sorted(found.difference(FIRST, LAST))
    return [name for name in (*FIRST, *middle, *LAST) if name in found]


def test_command(name: str, *options: str) -> tuple[str, ...]:
    """Returns the command of one test file."""
    return (*PYTEST, *options, f"tests/gpu/test_{name}.py")


def prepared(site: Path, packages: Path, *, dry_run: bool) -> list[Step]:
    """Returns the steps before the first test. `site`: where packages are unpacked, from the folder `packages`."""
    why_not = None if (packages / MANIFEST).exists() else f"there is no {packages} (make gpu-wheels)"
    if all(importlib.util.find_spec(name) for name in ("megatron", "sglang")):
        why_not = "trainer and engine are installed"
    unpack = Step(UNPACK, (PYTHON, "tools/gpu/unpack.py", str(packages), str(site)), 60, left_out=why_not)
    # SGLang finds the plugin by the metadata of a package, which need not be installed.
    installed = "slimx is installed" if any(metadata.distributions(name="slimx")) else None
    described = Step("metadata", (PYTHON, "setup.py", "--quiet", "egg_info"), 30, left_out=installed)
    no_nvcc = "there is no nvcc" if dry_run and not up_to_date(ROOT) and not has_nvcc() else None
    return [unpack, described, Step(LIBRARY, (PYTHON, "-m", "tools.gpu.library"), 240, left_out=no_nvcc)]


def on_gpu(out: Path, *, quick: bool, no_trainer: str | None) -> list[Step]:
    """Returns the tests and measurements. `out`: directory of the tables; `no_trainer`: why the trainer is left out."""
    steps = [Step(MACHINE, (PYTHON, "-m", "tools.gpu.machine"), 60)]
    for name in QUICK if quick else test_names():
        options = QUICK_TRAINER if quick and name in TRAINERS else ()
        seconds = 300.0 if name in (*TRAINERS, *LAST) else 120.0
        # The trainer runs without slimx's kernels. Each file has its process: a fault of the device ends its use.
        needs, left_out = ((), no_trainer) if name in TRAINERS else ((MACHINE,), None)
        steps.append(Step(f"tests of {name}", test_command(name, *options), seconds, needs, left_out))
    if quick:
        return steps
    measured = [
        Step("scales", (PYTHON, "tools/gpu/scales.py", str(out)), 60, (MACHINE,)),
        Step("benchmark of packing", (PYTHON, "benchmarks/reshard_cuda.py"), 150, (MACHINE,)),
        Step("benchmark of exact mode", (PYTHON, "benchmarks/exact_cuda.py"), 60, (MACHINE,)),
        Step("benchmark of the trainer", (PYTHON, "benchmarks/trainer_cuda.py"), 120, left_out=no_trainer),
    ]
    return [*steps[: -len(LAST)], *measured, *steps[-len(LAST) :]]


def loop_on_gpu(out: Path) -> list[Step]:
    """Returns the steps of the loop; its table and logs go into `out`/loop."""
    compiled, loop = "kernels of SGLang", ("-m", "tools.gpu.loop", "--out", str(out / "loop"))
    return [
        Step(MACHINE, (PYTHON, "-m", "tools.gpu.machine"), 60),
        Step(compiled, (PYTHON, "-m", "tools.gpu.kernels", "--out", str(KERNELS)), 240),
        Step("loop", (PYTHON, *loop), 300, (MACHINE, compiled)),
    ]


def without_gpu(*, no_trainer: str | None) -> list[Step]:
    """Returns what can be shown without a GPU."""
    steps = [Step("collection", (PYTHON, "-m", "tools.gpu.bare"), 120)]
    steps += [Step(f"tests of {name}", test_command(name), 300, left_out=no_trainer) for name in TRAINERS]
    for name, left_out in (("reshard_cuda", None), ("exact_cuda", None), ("trainer_cuda", no_trainer)):
        steps.append(Step(f"start of {name}", (PYTHON, f"benchmarks/{name}.py", "--help"), 60, left_out=left_out))
    return steps


def take(step: Step, output: Path, seconds: float, environment: dict[str, str]) -> str:
    """Takes one step; returns its finding. Appends all that it prints to `output`; prints the end where it failed.

    `seconds`: all that is left. Raises Failed where nothing is."""
    if step.left_out:
        raise LeftOut(step.left_out)
    if seconds <= 0:
        raise Failed("not begun: no time was left (--seconds)")
    log = output.with_suffix(".step")
    try:
        return run_command(step.command, log, min(step.seconds, seconds), environment)
    except Failed:
        print(log.read_text(errors="replace")[-TAIL:], flush=True)
        raise
    finally:
        with output.open("a") as file:
            file.write(f"\n==== {step.name}\n{log.read_text(errors='replace')}")
        log.unlink()


def variables(site: Path | None, *, engine: bool = False) -> dict[str, str]:
    """Returns the environment of steps. `site`: directory of the unpacked packages; None: those that are installed.
    `engine`: for steps that run SGLang, whose kernels may have a stand-in."""
    stand_ins = engine and importlib.util.find_spec("sgl_kernel") is None
    paths = (str(ROOT), site and str(site), stand_ins and str(STAND_INS), os.environ.get("PYTHONPATH"))
    more = {"SGLANG_JIT_CACHE_DIR": str(KERNELS)} | (VARIABLES if stand_ins else {}) if engine else {}
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def no_gpu() -> str | None:
    """Returns why nothing can run here, in one sentence. Another process asks: this one stays without CUDA."""
    ask = "import torch; print(torch.cuda.device_count() if torch.version.cuda else 'CPU build')"
    found = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True)
    answer = found.stdout.strip() or (found.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if answer == "CPU build":
        return f"the torch of {PYTHON} is a CPU build: run on a machine with a GPU, by make gpu PYTHON=..."
    if not answer.isdigit():
        return f"torch does not say how many devices there are: {answer}"
    return (
        None if int(answer) else "torch counts 0 CUDA devices: run this where nvidia-smi shows one, or make gpu DRY=1"
    )


def run(steps: Iterable[Step], taken: Steps, output: Path, ends: float, environment: dict[str, str]) -> None:
    """Takes steps up to the time `ends`; each counts in `taken`."""
    for step in steps:
        work = partial(take, step, output, ends - time.monotonic(), environment)
        taken.take(step.name, work, needs=step.needs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, help="for all steps together [450; --quick 120, --loop 360]")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", action="store_true", help="what shows most, and no measurement")
    kinds.add_argument("--loop", action="store_true", help="a trainer and a server that take turns, and no test")
    kinds.add_argument("--dry-run", action="store_true", help="what can be shown without a GPU")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="--dry-run: these steps and no other")
    options = parser.parse_args()
    if options.only and not options.dry_run:
        parser.error("--only needs --dry-run")
    ends = time.monotonic() + (options.seconds or (120 if options.quick else 360 if options.loop else 450))
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"{PYTHON} has no {', '.join(absent)}: make gpu PYTHON=/path/to/python of another environment")
        return 2
    if not options.dry_run and (reason := no_gpu()):
        print(reason)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    output, site = out / "output.txt", out / "site"
    output.write_text("")
    taken = Steps(f"make gpu, {time.strftime('%Y-%m-%d')}", out / "check.md")
    run(prepared(site, PACKAGES, dry_run=options.dry_run), taken, output, ends, variables(None))
    unpacked, no_trainer = taken.state(UNPACK) == "ok", None
    if importlib.util.find_spec("megatron") is None and not unpacked:
        no_trainer = f"megatron-core is not installed, and nothing was unpacked from {PACKAGES} (make gpu-wheels)"
    if options.dry_run:
        steps = without_gpu(no_trainer=no_trainer)
        if unknown := set(options.only or ()) - {step.name for step in steps}:
            parser.error(f"--only: there is no step {', '.join(sorted(unknown))}")
        steps = [step for step in steps if not options.only or step.name in options.only]
    elif options.loop:
        steps = loop_on_gpu(out)
    else:
        steps = on_gpu(out, quick=options.quick, no_trainer=no_trainer)
    run(steps, taken, output, ends, variables(site if unpacked else None, engine=options.loop))
    print(f"{taken.summary()}; the table is {taken.path}, what the steps print {output}")
    return int(bool(taken.failed))


if __name__ == "__main__":
    sys.exit(main())
