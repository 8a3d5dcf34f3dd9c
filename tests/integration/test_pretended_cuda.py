"""The trainer's code for GPUs puts every tensor on the right device, and waits for the GPU no more than it must.

A whole run, from loading weights to a restored checkpoint, on pretended CUDA tensors (`pretended_cuda`) and on the CPU:
`tests/gpu/test_trainer.py` does the same on a real GPU. Torch's layers only, since Transformer Engine is not here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.chosen import chosen_cases
from tests.integration.rank_processes import run_programs

pytestmark = pytest.mark.integration
CASES = ["qwen", pytest.param("deepseek", marks=pytest.mark.slow("full grid of models"))]
NO_WAITS = (
    "forward_backward.py",
    "logprobs.py",
    "policy_model.py",
    "passes.py",
    "parallel.py",
    "layers.py",
)
"""Files of slimx in which the host only queues work. Upstream's files and torch's layers wait, as docs/operations.md
says; the metrics are read once per step."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of both runs, with the models of the chosen tests."""
    chosen = {case.get("case") for case in chosen_cases(request)}
    cases = sorted({"qwen"} | chosen & {"deepseek"}, reverse=True)
    out = {kind: tmp_path_factory.mktemp(kind) for kind in ("pretended", "cpu")}
    for kind, role, command in (
        ("pretended", "rank_on_pretended_gpu", ["-m", "tests.integration.pretended_cuda_rank"]),
        ("cpu", "rank", ["-m", "tests.gpu.trainer_rank", "cpu"]),
    ):
        run_programs([[*command, str(out[kind]), *cases]], [out[kind] / "output.txt"], role=role)
    return out


def test_the_pretence_refuses_a_sum_over_two_devices(runs):
    """Else the runs below would say nothing."""
    said = (runs["pretended"] / "mixed.txt").read_text()
    assert "aten::add" in said and said.count("[(2,)]") == 2, "the operation, and a tensor on each side"


@pytest.mark.parametrize("case", CASES)
def test_the_run_on_the_device_is_the_run_on_the_cpu(runs, case):
    found, expected = (load_file(runs[kind] / f"{case}.safetensors") for kind in ("pretended", "cpu"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Attention's C++ chooses another kernel for the pretended tensors; see test_trainer for three steps' share.
        bound = 1e-3 if name.startswith(("weights.", "restored.")) else 1e-5
        assert (found[name] - value).abs().max() <= bound * max(1.0, value.abs().max()), name
    said = json.loads((runs["pretended"] / f"{case}.json").read_text())
    assert said["after_save"] == said["after_restore"]


def test_the_host_waits_for_the_gpu_only_where_it_must(runs):
    waits = {
        place: count for place, count in json.loads((runs["pretended"] / "waits.json").read_text()).items() if count
    }
    places = {place.split("/")[-1].split(":")[0] for place in waits}
    assert not places & set(NO_WAITS), waits
    assert "rope_utils.py" in places  # upstream's: the count works
    steps = len([*runs["pretended"].glob("*.safetensors")]) * 5
    norm = [count for place, count in waits.items() if "clip_grads.py" in place]
    assert norm and sum(norm) <= steps, "one wait for the gradient norm of a step"


def test_moments_that_visit_the_device_cost_one_wait_a_step(runs):
    """Three steps of four pieces: the same numbers as on the CPU."""
    assert json.loads((runs["pretended"] / "moments.json").read_text()) == {"alike": True, "waits": 3, "copies": {}}
