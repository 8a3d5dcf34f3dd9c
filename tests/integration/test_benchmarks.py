"""Every benchmark runs, in its smallest form: what it prints is no figure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
pytestmark = pytest.mark.integration

CHEAP = {
    "delta_rule": "--tokens 32 --heads 2 --size 16 --cut 10 --requests 2",
    "exact_cuda": "",
    "logprobs": "--tokens 64 --vocabulary 256 --hidden 32 --rounds 1 --chunks 16",
    "numerics": "--hidden 64 --layers 1 --rounds 1",
    "publish_delta": "--steps 1 --warm 0 --rates 1e-6 --layers 1 --rows 1 --length 16 --disk disk",
    "reshard": "--experts 2 --rounds 1 --threads 1",
    "reshard_cuda": "--experts 2 --rounds 1",
}
"""Run in children of one process, which has imported what they share."""
APART = {
    "loop": "--pairs 2 --prompts 8",
    "publish_dealing": "--cases 1",
    "rollout": "--only buffer --trajectories 64 --groups 2",
    "rollout_waiting": "--only memory deadlines --sides hook --counts 8 --count 8 --prompt 32",
    "trainer": "--ranks 1 --rows 2 --pairs 6",
}
"""Start processes of their own, which begin with the program's file."""
SLOW = {
    "balance": "--rounds 2",
    "convert": "--gb 0.1 --rounds 1",
    "numerics_server": "--size tiny --tokens 2",
    "numerics_trainer": "--sizes tiny --pairs 6",
    "publish": "--rounds 3",
    "publish_direct": "--mbit 200 --rounds 1 --layers 1 --hosts 1x1",
    "recovery": "--hidden 64 --layers 2",
    "rollout": "--only generation skew --pairs 2 --rounds 2 --steps 2",
    "trainer_cuda": "--device cpu --steps 1 --models tiny",
}
ELSEWHERE = {"start": "compares with TRL, which no lock has", "start_trl": "the same, of TRL alone"}
"""Benchmarks that no test can run, each with the reason."""
REFUSED = {
    "exact_cuda": "a GPU",
    "loop": "steps long enough to cite",
    "publish_direct": "a prediction within its goal",
    "reshard_cuda": "a GPU",
    "trainer": "steps long enough to cite",
}
"""Benchmarks that may end with status 1 here, by one sentence at their end, each with what it misses."""

PROGRAM = """
import os, runpy, shlex, sys, tempfile
sys.path[:0] = [{root!r}, {folder!r}]
import torch
from tests.forked import run_and_end
torch.set_num_threads(1)
for name, options in {runs!r}.items():
    sys.stdout.flush()
    with tempfile.TemporaryFile() as output:
        if not (child := os.fork()):
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            sys.argv = [path := os.path.join({folder!r}, name + ".py"), *shlex.split(options)]
            run_and_end(lambda: runpy.run_path(path, run_name="__main__"))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
    print("RAN", name, status, flush=True)
    print(text, flush=True)
"""


def judged(name: str, status: int, text: str) -> None:
    """Fails unless the benchmark did all its work."""
    assert "Traceback" not in text, text
    assert status in ((0, 1) if name in REFUSED else (0,)), (name, status, text)


def test_every_benchmark_is_run() -> None:
    """A new file is a benchmark with a row above, or imported by one."""
    texts = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    programs = {name for name, text in texts.items() if '__name__ == "__main__"' in text}
    assert programs == CHEAP.keys() | APART.keys() | SLOW.keys() | ELSEWHERE.keys()
    others = "\n".join(texts.values()) + (ROOT / "tests/integration/test_direct_links.py").read_text()
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", others, re.MULTILINE))
    by_path = set(re.findall(r"\b(\w+)\.\w+\"", others))  # hooks
    assert texts.keys() - programs - imported - by_path == set()


def test_the_cheap_benchmarks_run(tmp_path: Path) -> None:
    program = PROGRAM.format(root=str(ROOT), folder=str(FOLDER), runs=CHEAP)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *parts = re.split(r"^RAN (\w+) (-?\d+)$", done.stdout, flags=re.MULTILINE)
    found = {name: (int(status), text) for name, status, text in zip(*[iter(parts)] * 3, strict=True)}
    assert found.keys() == CHEAP.keys()
    for name, (status, text) in found.items():
        judged(name, status, text)


@pytest.mark.parametrize(
    ("name", "options"), [*APART.items(), *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW.items())]
)
def test_a_benchmark_runs(name: str, options: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *options.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    judged(name, done.returncode, done.stdout)
