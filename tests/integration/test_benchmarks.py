"""Every benchmark runs, in its smallest form: what it prints is no figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program
from tests.warm.interpreter import ROOT

FOLDER = ROOT / "benchmarks"
pytestmark = pytest.mark.integration

QUICK = {
    "answers": "--tokens 100 --routed 1100 --rounds 1",
    "convert": "--gb 0.02 --hidden 256 --rounds 1 --only hf-to-megatron",
    "delta_rule": "--tokens 32 --heads 2 --size 16 --cut 10 --requests 2",
    "exact_cuda": "",
    "images": "--images 2 --width 96 --height 64 --processes 1 --rounds 1",
    "logprobs": "--tokens 1024 --vocabulary 2048 --hidden 32 --rounds 1 --chunks 16",
    "loop": "--pairs 2 --prompts 8",
    "numerics": "--hidden 64 --layers 1 --rounds 1",
    "numerics_server": "--size tiny --tokens 2 --batches 1",
    "numerics_trainer": "--sizes tiny --pairs 6 --rows 2 --dtypes float32",
    "publish": "--rounds 3 --experts 2 --cases 1",
    "publish_dealing": "--cases 1",
    "publish_delta": "--steps 1 --warm 0 --rates 1e-6 --layers 1 --rows 1 --length 16 --disk disk",
    "publish_direct": "--mbit 200 --rounds 1 --layers 1 --hosts 1x1",
    "publish_vision": "--layers 1 --depth 1 --rounds 1",
    "reshard": "--experts 2 --rounds 1 --threads 1",
    "reshard_cuda": "--experts 2 --rounds 1",
    "rollout": "--only buffer --trajectories 64 --groups 2",
    "rollout_scale": "--only scale --workers 1 --groups 1 --steps 1 --warmup 1 --rate 200 --wait 0.05 --turns 2",
    "rollout_waiting": "--only memory deadlines --sides hook --counts 8 --count 8 --prompt 32",
    "start": "--pairs 1 --model {model} --task {task}",
    "trainer": "--ranks 1 --rows 2 --pairs 6",
    "trainer_cuda": "--device cpu --steps 1 --models tiny",
}
"""The smallest form of each."""
SLOW = {
    "balance": "--rounds 2",
    "convert": "--gb 0.1 --rounds 1",
    "publish": "--rounds 3",
    "recovery": "--hidden 64 --layers 2",
    "rollout": "--only generation skew --pairs 2 --rounds 2 --steps 2",
    "rollout_scale": "--workers 1 2 --groups 1 --steps 1 --warmup 1 --wait 0.2 --count 256",
}
"""Benchmarks, and parts of them, that take longer."""
ELSEWHERE = {"start_trl": "TRL is in no lock"}
"""Benchmarks that no test can run, each with the reason."""
REFUSED = {
    "balance": "steps long enough to cite",
    "exact_cuda": "a GPU",
    "loop": "steps long enough to cite",
    "publish_direct": "a prediction within its goal",
    "reshard_cuda": "a GPU",
    "trainer": "steps long enough to cite",
}
"""Benchmarks that may end with status 1 here, by one sentence at their end, each with what it misses."""


def judged(name: str, status: int, text: str) -> None:
    """Fails unless the benchmark did all its work."""
    assert "Traceback" not in text, text
    assert status in ((0, 1) if name in REFUSED else (0,)), (name, status, text)


def test_every_benchmark_is_run() -> None:
    """A new file is a benchmark with a row above, or imported by one."""
    texts = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    programs = {name for name, text in texts.items() if '__name__ == "__main__"' in text}
    assert programs == QUICK.keys() | SLOW.keys() | ELSEWHERE.keys()
    others = "\n".join(texts.values()) + (ROOT / "tests/integration/test_direct_links.py").read_text()
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", others, re.MULTILINE))
    by_path = set(re.findall(r"\b(\w+)\.\w+\"", others))  # hooks
    assert texts.keys() - programs - imported - by_path == set()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *QUICK.items(),
        *(pytest.param(*row, marks=pytest.mark.slow("whole runs and servers")) for row in SLOW.items()),
    ],
)
@pytest.mark.timeout(3600)
def test_a_benchmark_runs(name: str, options: str, tiny_model: Path, task_of_sums: Path, tmp_path: Path) -> None:
    words = options.format(model=tiny_model, task=task_of_sums).split()
    status, text = run_program([f"benchmarks/{name}.py", *words], tmp_path, deadline_s=3000)
    judged(name, status, text)
