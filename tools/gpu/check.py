"""Builds the kernels, tests them and the trainer on this machine's GPU and measures them: `make gpu`.

    python tools/gpu/check.py [--out DIR] [--seconds 450] [--skip-build]

Needs nvcc, a C++ compiler, pytest, numpy, torch, setuptools and, for one test, Triton; nothing else of slimx and no
network. The trainer also needs megatron-core: installed, or as wheels in build/gpu-wheels (`make gpu-wheels`, where
there is a network), which are unpacked for its own test and benchmark; without either these are left out.
Into DIR go summary.txt, output.txt, and triton_scales.npy: the table for the rule triton on the CPU, to be
stored in slimx/reshard. Exits with 1 where anything failed, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("errors", "pack", "triton", "numerics", "streams", "sharing", "channel", "sanitizer")
"""Files of tests/gpu."""
WHEELS = ROOT / "build" / "gpu-wheels"
"""The wheels that tools/gpu/wheels.py collects."""
NEEDED = ("numpy", "torch", "pytest", "setuptools")


class Summary:
    """Lines that are printed as they come and kept in a file."""

    def __init__(self, path: Path):
        self.path, self.failed = path, False
        path.write_text("")

    def say(self, line: str) -> None:
        print(f"gpu: {line}", flush=True)
        with self.path.open("a") as out:
            out.write(line + "\n")

    def fail(self, line: str) -> None:
        self.failed = True
        self.say("FAILED " + line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, default=450, help="for all steps together")
    parser.add_argument("--skip-build", action="store_true", help="the libraries in slimx/_lib are up to date")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "output.txt").unlink(missing_ok=True)
    summary, start = Summary(out / "summary.txt"), time.monotonic()

    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        summary.say(
            f"{sys.executable} has no {', '.join(absent)}: make gpu PYTHON=/path/to/python of another environment"
        )
        return 2
    reason = no_gpu()
    if reason:
        summary.say(reason)
        return 2

    def left() -> float:
        return max(10.0, options.seconds - (time.monotonic() - start))

    if not options.skip_build and not step(summary, "build", build_command(), out, left()):
        if not (ROOT / "slimx" / "_lib" / "libslimx_cuda.so").exists():
            return 1
        summary.say("going on with the libraries that were in slimx/_lib before")
    ask = "import sys; from slimx.reshard.kernels import cuda; sys.exit(cuda.missing())"
    if not step(summary, "library", [sys.executable, "-c", ask], out, left()):
        return 1
    facts(summary)
    step(summary, "scales", [sys.executable, __file__.replace("check.py", "scales.py"), str(out)], out, left())
    for name in TESTS:  # each in a process of its own: a fault of the device ends a process's use of it
        pytest = [sys.executable, "-m", "pytest", "-rs", "-q", "--maxfail=8", f"tests/gpu/test_{name}.py"]
        step(summary, f"tests of {name}", pytest, out, left() if name == "sanitizer" else min(left(), 120))
        if name == "channel":
            trainer(summary, out, left)
        if name == "streams":  # before the sanitizer, which is slow and matters only where the rest passes
            step(summary, "benchmark", [sys.executable, "benchmarks/reshard_cuda.py"], out, min(left(), 150))
    summary.say(
        f"{'FAILED' if summary.failed else 'passed'} in {time.monotonic() - start:.0f} s; all output is in {out}"
    )
    return int(summary.failed)


def trainer(summary: Summary, out: Path, left: Callable[[], float]) -> None:
    """The trainer's test and benchmark, if megatron-core is there or can be unpacked."""
    environment = dict(os.environ)
    if importlib.util.find_spec("megatron") is None:
        wheels, site = sorted(map(str, WHEELS.glob("*.whl"))), out / "site"
        if not wheels:
            return summary.say(
                f"left out: the trainer, which needs megatron-core: not installed, no wheels in {WHEELS}"
            )
        shutil.rmtree(site, ignore_errors=True)
        unpack = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        if not step(summary, "wheels", [*unpack, "--target", str(site), *wheels], out, min(left(), 60)):
            return None
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-q",
        "tests/gpu/test_trainer.py",
        "tests/gpu/test_exact_trainer.py",
    ]
    step(summary, "tests of trainer", pytest, out, min(left(), 240), environment)
    measure = [sys.executable, "benchmarks/trainer_cuda.py"]
    step(summary, "benchmark of the trainer", measure, out, min(left(), 90), environment)


def no_gpu() -> str | None:
    """Why nothing can run here, in one sentence. In a process of its own: this one stays without CUDA."""
    ask = "import torch; print(torch.cuda.device_count() if torch.version.cuda else 'CPU build')"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    said = found.stdout.strip() or found.stderr.strip().splitlines()[-1]
    if said == "CPU build":
        return f"the torch of {sys.executable} is a CPU build: run on a machine with a GPU, by make gpu PYTHON=..."
    if not said.isdigit():
        return f"torch cannot be asked for devices: {said}"
    return None if int(said) else "there is no GPU: torch counts 0 CUDA devices; run this where nvidia-smi shows one"


def build_command() -> list[str]:
    return ["env", "SLIMX_CUDA=1", sys.executable, "setup.py", "build_ext", "--inplace"]


def facts(summary: Summary) -> None:
    """The machine and versions that the figures belong to."""
    ask = (
        "import sys, torch; p = torch.cuda.get_device_properties(0); "
        "print(f'{p.name}, {p.multi_processor_count} processors, {p.total_memory / 2**30:.0f} GiB, '"
        "f'sm_{p.major}{p.minor}; torch {torch.__version__}, Python {sys.version.split()[0]}')"
    )
    for command in (
        [sys.executable, "-c", ask],
        ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"],
        ["nvcc", "--version"],
        ["git", "log", "-1", "--format=%h %s"],
    ):
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            lines = (done.stdout or done.stderr).strip().splitlines()
            summary.say(f"{Path(command[0]).name}: {lines[-1] if lines else 'said nothing'}")


def step(
    summary: Summary,
    name: str,
    command: list[str],
    out: Path,
    seconds: float,
    environment: dict[str, str] | None = None,
) -> bool:
    """Runs `command`, shows its output and keeps it; False where it failed or took longer than `seconds`."""
    start, log = time.monotonic(), out / "output.txt"
    before = log.stat().st_size if log.exists() else 0
    with log.open("a") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    text = log.read_bytes()[before:].decode(errors="replace")
    print(text[-6000:], flush=True)
    taken = f"{name} ({time.monotonic() - start:.0f} s)"
    if code == 0:
        summary.say(f"ok {taken}: {text.strip().splitlines()[-1][:160] if text.strip() else ''}")
    elif code is None:
        summary.fail(f"{taken}: not done after {seconds:.0f} s")
    else:
        summary.fail(f"{taken}: exit code {code}")
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
