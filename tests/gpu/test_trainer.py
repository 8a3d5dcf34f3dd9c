"""The trainer on one GPU with NCCL gives the run that it gives on the CPU with gloo.

Both are processes of their own on the same models and rollouts (`trainer_cases`, `trainer_rank`). They need
megatron-core and what else `tools/gpu/wheels.py` lists. Without a GPU the tests of the CPU's run remain.

Bounds are those of the order of sums, which differs between devices. For comparison, other micro-batches on the CPU
change gradients by 3e-6, the gradient norm of the third step by 2e-6 and the weights' way in three steps by 7e-4, all
relative to the largest of a tensor; a learning rate 1% higher changes that way by 0.4 and more (2026-11-21).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

REASON = "megatron-core is not installed; `make gpu-wheels`, where there is a network, collects it for `make gpu`"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason=REASON)
if importlib.util.find_spec("megatron") is not None:
    from safetensors.torch import load_file

    from tests.gpu.trainer_cases import CASES, STEPS

ROOT = Path(__file__).parents[2]
EXACT = ["qwen", "deepseek"]
"""Cases in fp32: without TF32, which torch leaves off."""
SECONDS = 150
"""Limit of one process: imports, three models, and on a GPU the compilation of megatron-core's router."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@dataclass(frozen=True)
class Run:
    """Report and tensors of one process for a case."""

    report: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def all(self, kind: str) -> dict[str, torch.Tensor]:
        return {name.partition(".")[2]: value for name, value in self.tensors.items() if name.startswith(f"{kind}.")}

    def change(self) -> dict[str, torch.Tensor]:
        """Returns the difference of each parameter after STEPS steps."""
        before = self.all("before")
        return {name: value - before[name] for name, value in self.all("weights").items()}


Runs = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Yields `runs(kind, case)`; each kind of device is one process, and all begin together, with the cases of the
    selected tests."""
    items = (item for item in request.session.items if hasattr(item, "callspec"))
    selected = {item.callspec.params.get(name) for item in items for name in ("case", "exact_case")}
    cases = [case for case in CASES if case in selected]
    out = tmp_path_factory.mktemp("runs")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ends = time.monotonic() + SECONDS
    with ExitStack() as stack:
        processes = {}
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            (out / kind).mkdir()
            log = stack.enter_context((out / kind / "output.txt").open("w"))
            command = [sys.executable, "-m", "tests.gpu.trainer_rank", kind, str(out / kind), *cases]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes[kind] = stack.enter_context(process)
            stack.callback(process.kill)

        def run(kind: str, case: str) -> Run:
            with suppress(subprocess.TimeoutExpired):
                processes[kind].wait(max(0.0, ends - time.monotonic()))
            if not (out / kind / f"{case}.safetensors").exists():
                log = (out / kind / "output.txt").read_text()
                pytest.fail(f"the {kind} process did not finish {case}:\n{log[-4000:]}")
            report = json.loads((out / kind / f"{case}.json").read_text())
            return Run(report, load_file(out / kind / f"{case}.safetensors"))

        yield run


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Returns the largest max|a - b| / max|b| of a tensor, and its name."""
    assert found.keys() == expected.keys() and expected
    errors = []
    for name, reference in expected.items():
        assert found[name].isfinite().all(), name
        difference = (found[name] - reference).abs().max().item()
        errors.append((difference / (reference.abs().max().item() or 1.0), name))
    return max(errors)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the relative difference of all tensors together, as one vector."""
    square = sum(float((found[name] - reference).square().sum()) for name, reference in expected.items())
    return (square / sum(float(reference.square().sum()) for reference in expected.values())) ** 0.5


@needs_gpu
@pytest.mark.parametrize("case", EXACT)
def test_logprobs_are_those_of_the_cpu(runs: Runs, case: str) -> None:
    difference, name = worst(runs("cuda", case).all("logprobs"), runs("cpu", case).all("logprobs"))
    assert difference <= 2e-5, name


@needs_gpu
@pytest.mark.parametrize("case", EXACT)
def test_gradients_are_those_of_the_cpu(runs: Runs, case: str) -> None:
    difference, name = worst(runs("cuda", case).all("gradient"), runs("cpu", case).all("gradient"))
    assert difference <= 1e-4, name


@needs_gpu
@pytest.mark.parametrize("case", EXACT)
def test_losses_and_norms_of_all_steps_are_those_of_the_cpu(runs: Runs, case: str) -> None:
    """Also the log-prob gap and the routes, which are measured on the device. Counts are exact but for tokens that
    stand at a limit."""
    found, expected = (runs(kind, case).report["steps"] for kind in ("cuda", "cpu"))
    for mine, reference in zip(found, expected, strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    for name in ("loss/policy", "kl/reference", "gap/mean", "optim/grad_norm"):
        assert found[0][name] == pytest.approx(expected[0][name], rel=1e-4, abs=1e-6), name


@needs_gpu
@pytest.mark.parametrize("case", EXACT)
def test_weights_after_the_steps_are_those_of_the_cpu(runs: Runs, case: str) -> None:
    difference, name = worst(runs("cuda", case).change(), runs("cpu", case).change())
    assert difference <= 0.05, name
    assert distance(runs("cuda", case).change(), runs("cpu", case).change()) <= 0.01


@needs_gpu
@pytest.mark.parametrize(("exact_case", "case"), [("qwen", "qwen-bf16")])
def test_bf16_is_as_near_to_fp32_as_on_the_cpu(runs: Runs, exact_case: str, case: str) -> None:
    """Two bf16 runs differ by roundings that fall either way, experts included: each is held against fp32 instead."""
    exact, cpu, gpu = runs("cpu", exact_case), runs("cpu", case), runs("cuda", case)
    assert worst(gpu.all("before"), cpu.all("before"))[0] == 0
    for kind in ("logprobs", "gradient"):
        allowed = distance(cpu.all(kind), exact.all(kind))
        assert 0 < allowed < 0.2
        assert distance(gpu.all(kind), exact.all(kind)) <= 2 * allowed, kind
    for found, expected in zip(gpu.report["steps"], exact.report["steps"], strict=True):
        assert found["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=0.15)
        assert found["optim/skipped"] == 0


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("case", [*EXACT, "qwen-bf16"])
def test_a_restored_checkpoint_goes_on_as_the_run_that_wrote_it(runs: Runs, kind: str, case: str) -> None:
    """The weights bit for bit, the next step as far as sums on a GPU have an order: there, additions into one place
    (tokens that return from their experts, rows of the embedding) come as they come. The same step after an offload."""
    run = runs(kind, case)
    assert len(run.report["steps"]) == STEPS
    assert worst(run.all("restored"), run.all("weights"))[0] == 0
    assert run.report["after_save"].keys() == run.report["after_restore"].keys()
    gpu_bound = 1e-2 if case.endswith("bf16") else 1e-5
    bound = 0.0 if kind == "cpu" else gpu_bound
    for name, value in run.report["after_save"].items():
        assert run.report["after_restore"][name] == pytest.approx(value, rel=bound, abs=bound), name


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("case", [*EXACT, "qwen-bf16"])
def test_every_parameter_learns(runs: Runs, kind: str, case: str) -> None:
    """Else the comparisons above would compare nothing."""
    still = {name for name, change in runs(kind, case).change().items() if not change.any()}
    assert still <= {name for name in still if name.endswith("expert_bias")}
