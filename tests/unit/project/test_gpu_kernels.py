"""The kernels that SGLang makes at run time can be compiled ahead, without a GPU too, and one that fails is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.kernels import compile_all
from tools.steps import ROOT


def test_a_kernel_that_fails_ends_no_other_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = []

    def fail() -> None:
        raise RuntimeError("ptxas")

    assert compile_all({"bad": fail, "good": lambda: compiled.append("good")}, jobs=1) == ["bad"]
    assert compiled == ["good"]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["bad: RuntimeError: ptxas", "good: 0 s"]


@pytest.mark.slow("compiles every kernel by nvcc")
@pytest.mark.needs("nvcc")
def test_every_kernel_compiles_and_is_found_again(tmp_path: Path) -> None:
    paths = (ROOT, ROOT / "tools" / "gpu" / "stand_ins", *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": "ignore"}
    command = (sys.executable, "-m", "tools.gpu.kernels", "--out", str(tmp_path), "--jobs", "2")

    def compile_here() -> list[str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        return done.stdout.splitlines()

    names = {line.partition(":")[0] for line in compile_here()}
    assert len(list(tmp_path.glob("sm90a/*/build-*/deps-*/*.so"))) == len(names)
    assert {line.partition(": ")[2] for line in compile_here()} == {"0 s"}
