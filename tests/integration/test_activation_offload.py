"""Activations that wait on the host come back as they were: weights are those of a run without, to the last bit, under
every layout, and the device's memory is what `slimx plan` says.

megatron-core's own code runs, on pretended CUDA tensors (`pretended_cuda`): streams, pinned memory and Transformer
Engine's kernels are not shown by that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.layout.ranks import coordinates, sizes_of
from slimx.models.families import read_model
from slimx.runtime.ports import free_port
from tests.gpu.trainer_cases import write_model
from tests.integration.invariance_models import DEEPSEEK, QWEN
from tests.integration.memory_rank import config
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration
WITHIN = 0.15
ALL = {
    "offload_activations": ["core_attn", "attn_proj", "expert_fc1", "moe_act"],
    "megatron": {"min_offloaded_tensor_size": 1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"model": "qwen", "layout": {"world_size": 1}},
    "TP2xEP2": {"model": "qwen", "layout": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1}},
    "CP2": {"model": "qwen", "layout": {"world_size": 2, "context": 2}},
    "PP2": {"model": "qwen", "layout": {"world_size": 2, "pipeline": 2}},
    "latent": {"model": "deepseek", "layout": {"world_size": 1}},
}
WAYS: list[dict[str, Any]] = [{}, ALL]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "single" else [pytest.mark.slow("layouts of several ranks")]) for n in LAYOUTS],
)
def test_weights_do_not_depend_on_where_activations_wait(name: str, tmp_path: Path):
    model, world = LAYOUTS[name]["model"], LAYOUTS[name]["layout"]["world_size"]
    write_model(tmp_path / model, {"qwen": QWEN, "deepseek": DEEPSEEK}[model], 0, seed=1)
    job = {
        **LAYOUTS[name],
        "models": str(tmp_path),
        "out": str(tmp_path),
        "case": {"tokens": 256, "length": 128},
        "ways": WAYS,
        "init_method": f"tcp://127.0.0.1:{free_port()}",
    }
    job["rollouts"] = 2 * sizes_of(config(job | {"rollouts": 1}, model, job["case"]).trainer).data
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.activation_offload_rank", tmp_path, world, role="rank_on_pretended_gpu")
    for rank in range(world):
        plain, *others = json.loads((tmp_path / f"{rank}.json").read_text())
        check_plan(job, {}, rank, plain)
        for way, said in zip(WAYS[1:], others, strict=True):
            assert said["weights"] == plain["weights"]
            assert said["peak"] < plain["peak"]
            check_plan(job, way, rank, said)


def check_plan(job: dict[str, Any], way: dict[str, Any], rank: int, said: dict[str, Any]) -> None:
    """A plan knows the bytes that were moved in an update, and those that were on the device at once."""
    settings = config(job, job["model"], job["case"] | {"trainer": way})
    sizes, spec = sizes_of(settings.trainer), read_model(settings.model.path)
    stage = coordinates(rank, sizes).pipeline
    (record,) = (each for each in trainer_memory(settings, spec, sizes, "cpu") if each.stage == stage)
    off = record.peak / (said["state"] + said["peak"]) - 1
    # Of latent attention the plan counts what Transformer Engine keeps, not what plain torch does (docs/trainer.md).
    moved = record.moved / said["moved"] - 1 if way and job["model"] != "deepseek" else 0.0
    print(f"rank {rank}, {len(way.get('offload_activations', ()))} parts: peak {off:+.1%}, moved {moved:+.1%}")
    assert abs(off) <= WITHIN and abs(moved) <= WITHIN, (way, record, said)
