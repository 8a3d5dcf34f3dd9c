"""Activations that wait on the host come back as they were: weights are those of a run without, to the last bit, under
every layout, and the device's memory is what `slimx plan` says.

megatron-core's own code runs, on pretended CUDA tensors (`pretended_cuda`): streams, pinned memory and Transformer
Engine's kernels are not shown by that.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.layout.ranks import coordinates, sizes_of
from slimx.models.families import read_model
from tests.gpu.trainer_cases import write_model
from tests.integration.full_steps import config, micro_batches
from tests.integration.invariance_models import DEEPSEEK, QWEN
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
OPTIONS: list[dict[str, Any]] = [{}, ALL]
STEPS = (1, 2, 1)
"""Micro-batches of each step: upstream would take the first step's number for all."""


def train(job: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """Trains on a pretended GPU with each set of options.

    Returns, for each, a digest of the weights after every step, the most bytes on the GPU and the bytes that were moved
    in the longest, and those of weights, gradients and optimizer state."""
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    parallel = pretended_cuda.join(job, rank)
    pretend_transformer_engine()
    results = [train_with(job, options, parallel) for options in job["options"]]
    parallel.destroy()
    return results


def pretend_transformer_engine() -> None:
    """Replaces what megatron-core asks of it other than the layers, also for tensors on the pretended GPU."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.moe import experts

    from slimx.trainer.device import backends
    from tests.integration.pretended_cuda import Pretended, move_rotation_of_latent_attention

    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    transformer_engine.set_save_original_input = experts.set_save_original_input = lambda module: None
    backends._check_offload = lambda *_: None
    Pretended.untyped_storage = lambda self: self.host_tensor.untyped_storage()
    move_rotation_of_latent_attention()


def train_with(job: dict[str, Any], options: dict[str, Any], parallel: Any) -> dict[str, Any]:
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer
    from tests.integration.pretended_cuda import LiveBytes

    settings = config(job, job["model"], job["case"] | {"trainer": options})
    trainer = PolicyTrainer(settings, read_model(settings.model.path), parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    assert len(batches) == max(STEPS)
    digests, peaks, moved = [], [], []
    trainer.logprobs(batches)  # before the first step, as evaluations and old log-probs come
    for step, count in enumerate(STEPS):
        with LiveBytes() as live:
            trainer.train_step(batches[:count], step=step, version=1)
        peaks.append(live.peak)
        moved.append(moved_bytes() if settings.trainer.offload_activations else 0)
        digests.append(digest_of(trainer.weights.parameters))
        trainer.logprobs(batches[:1])
    state = sum(trainer.offloading.sizes().values())
    longest = STEPS.index(max(STEPS))
    return {"weights": digests, "peak": peaks[longest], "moved": moved[longest], "state": state}


def moved_bytes() -> int:
    """Returns bytes of the last pass, whose chunks megatron-core still knows."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    chunks = PipelineOffloadManager.get_instance()._cached_chunks_forward
    return sum(group.total_offload_bytes for chunk in chunks for group in chunk.offload_groups)


def digest_of(parameters: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        found.update(name.encode() + parameter.detach().cpu().float().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "single" else [pytest.mark.slow("layouts of several ranks")]) for n in LAYOUTS],
)
def test_weights_do_not_depend_on_where_activations_wait(name: str, tmp_path: Path):
    model, world = LAYOUTS[name]["model"], LAYOUTS[name]["layout"]["world_size"]
    write_model(tmp_path / model, {"qwen": QWEN, "deepseek": DEEPSEEK}[model], 0, seed=1)
    job = {
        **LAYOUTS[name],
        "models": tmp_path,
        "out": tmp_path,
        "case": {"tokens": 256, "length": 128},
        "options": OPTIONS,
    }
    job["rollouts"] = 2 * sizes_of(config(job | {"rollouts": 1}, model, job["case"]).trainer).data
    results = run_ranks(train, tmp_path, world, job, role="rank_on_pretended_gpu")
    for rank, (plain, *others) in enumerate(results):
        check_plan(job, {}, rank, plain)
        for options, offloaded in zip(OPTIONS[1:], others, strict=True):
            assert offloaded["weights"] == plain["weights"]
            assert offloaded["peak"] < plain["peak"]
            check_plan(job, options, rank, offloaded)


def check_plan(job: dict[str, Any], options: dict[str, Any], rank: int, result: dict[str, Any]) -> None:
    """Checks that a plan knows the bytes that were moved in an update, and those that were on the device at once."""
    settings = config(job, job["model"], job["case"] | {"trainer": options})
    sizes, spec = sizes_of(settings.trainer), read_model(settings.model.path)
    stage = coordinates(rank, sizes).pipeline
    (record,) = (x for x in trainer_memory(settings, spec, sizes, "cpu") if x.stage == stage)
    off = record.peak / (result["state"] + result["peak"]) - 1
    # Of latent attention the plan counts what Transformer Engine keeps, not what plain torch does (docs/trainer.md).
    moved = record.moved / result["moved"] - 1 if options and job["model"] != "deepseek" else 0.0
    print(f"rank {rank}, {len(options.get('offload_activations', ()))} parts: peak {off:+.1%}, moved {moved:+.1%}")
    assert abs(off) <= WITHIN and abs(moved) <= WITHIN, (options, record, result)
