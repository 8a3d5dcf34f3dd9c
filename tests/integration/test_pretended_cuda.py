"""The trainer's code for GPUs puts every tensor on the right device, and waits for the GPU no more than it must.

A whole run, from loading weights to a restored checkpoint, on pretended CUDA tensors (`pretended_cuda`) and on the CPU:
`tests/gpu/test_trainer.py` does the same on a real GPU. Torch's layers only, since Transformer Engine is not here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.chosen import chosen_cases
from tests.integration.rank_processes import run_programs, run_ranks

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


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Runs the trainer of tests/gpu on a pretended GPU, with each model.

    Returns where the host would have waited for the GPU, what the pretence raises for a sum over two devices, and the
    results of `step_with_host_moments`."""
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    import torch

    parallel = pretended_cuda.join(job, rank)
    from slimx.trainer.device.offload import Offload
    from tests.gpu.trainer_rank import run

    pretended_cuda.move_rotation_of_latent_attention()
    torch.cuda.max_memory_allocated = lambda *args: 0
    Offload.offload = lambda self, *, weights=True: 0  # it moves storage, which a pretended tensor has not
    for name in job["cases"]:
        run(name, job["out"], parallel)
    moments = step_with_host_moments()
    parallel.destroy()
    with pytest.raises(RuntimeError) as refusal:
        torch.ones(2, device="cuda") + torch.ones(2)
    return {"waits": pretended_cuda.WAITS, "refusal": str(refusal.value), "moments": moments}


def step_with_host_moments() -> dict[str, Any]:
    """Three steps of an Adam whose moments lie on the host, in pieces of a parameter each; what the host waited for."""
    import torch

    from slimx.adapters.megatron.layers import Adam
    from slimx.extras.optimizer_offload.moments import HostMoments
    from tests.integration import pretended_cuda

    def stepped(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(size, generator=generator) for size in (7, 300, 5, 40)]
        parameters = [torch.nn.Parameter(values.to(device)) for values in drawn]
        optimizer = HostMoments(Adam(parameters, lr=0.01), fraction=1.0, piece_bytes=1)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        assert not any(moments["exp_avg"].is_cuda for moments in optimizer.state.values())
        return [parameter.detach().cpu() for parameter in parameters]

    stream, waits = torch.cuda.current_stream(), []
    wait = type(stream).synchronize
    type(stream).synchronize = lambda self: waits.append(1)
    before = pretended_cuda.WAITS.copy()
    found, expected = stepped("cuda"), stepped("cpu")
    type(stream).synchronize = wait
    return {
        "alike": all(map(torch.equal, found, expected)),
        "waits": len(waits),
        "copies": {place: n for place, n in (pretended_cuda.WAITS - before).items() if "moments.py" in place},
    }


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of both runs, with the models of the chosen tests."""
    chosen = {case.get("case") for case in chosen_cases(request)}
    cases = sorted({"qwen"} | chosen & {"deepseek"}, reverse=True)
    out = {kind: tmp_path_factory.mktemp(kind) for kind in ("pretended", "cpu")}
    run_ranks(train, out["pretended"], 1, {"cases": cases, "layout": {}}, role="rank_on_pretended_gpu")
    command = ["-m", "tests.gpu.trainer_rank", "cpu", str(out["cpu"]), *cases]
    run_programs([command], [out["cpu"] / "output.txt"])
    return out


@pytest.fixture(scope="module")
def results(runs: dict[str, Path]) -> dict[str, Any]:
    return json.loads((runs["pretended"] / "0.json").read_text())


def test_the_pretence_refuses_a_sum_over_two_devices(results):
    """Else the runs below would say nothing."""
    assert "aten::add" in results["refusal"]
    assert results["refusal"].count("[(2,)]") == 2, "the operation, and a tensor on each side"


@pytest.mark.parametrize("case", CASES)
def test_the_run_on_the_device_is_the_run_on_the_cpu(runs, case):
    found, expected = (load_file(runs[kind] / f"{case}.safetensors") for kind in ("pretended", "cpu"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Attention's C++ chooses another kernel for the pretended tensors; see test_trainer for three steps' share.
        bound = 1e-3 if name.startswith(("weights.", "restored.")) else 1e-5
        assert (found[name] - value).abs().max() <= bound * max(1.0, value.abs().max()), name
    losses = json.loads((runs["pretended"] / f"{case}.json").read_text())
    assert losses["after_save"] == losses["after_restore"]


def test_the_host_waits_for_the_gpu_only_where_it_must(runs, results):
    waits = {place: count for place, count in results["waits"].items() if count}
    places = {place.split("/")[-1].split(":")[0] for place in waits}
    assert not places & set(NO_WAITS), waits
    assert "rope_utils.py" in places  # upstream's: the count works
    steps = len([*runs["pretended"].glob("*.safetensors")]) * 5
    norm = [count for place, count in waits.items() if "clip_grads.py" in place]
    assert norm and sum(norm) <= steps, "one wait for the gradient norm of a step"


def test_moments_that_visit_the_device_cost_one_wait_a_step(results):
    """Three steps of four pieces: the same numbers as on the CPU."""
    assert results["moments"] == {"alike": True, "waits": 3, "copies": {}}
