"""One gloo rank of test_router: single training steps with replayed routes or with auxiliary terms.

Of each case all ranks together write CASE.safetensors (gradients by Hugging Face name) and CASE.after.safetensors (the
weights after the step), and the first rank of the last stage writes CASE.json: the step's metrics and the token ids of
the sequences in each of its micro-batches.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.saved.codec import load_groups
from slimx.orchestration.batches import make_packer
from tests.integration.gathering import write_tensors
from tests.integration.rank_start import join, leave


def config(job: dict[str, Any], case: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(job["out"])},
            "model": {"path": case["path"]},
            "numerics": {"dtype": "float32"},
            "trainer": {
                **job["layout"],
                # Every rank then holds whole gradients.
                "distributed_optimizer": False,
                "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
                "max_tokens_per_microbatch": 72,
                "megatron": {"mtp_num_layers": case["mtp"]} if case["mtp"] else {},
                **case["trainer"],
            },
            "rollout": {"prompts": "p"},
            "algorithm": {"name": "sft"},
        }
    )


def run(job: dict[str, Any], case: dict[str, Any], parallel: Any) -> None:
    import torch

    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer

    settings, sizes = config(job, case), parallel.sizes
    spec = read_model(case["path"], mtp_layers=case["mtp"])
    trainer = PolicyTrainer(settings, spec, parallel)
    (group,) = load_groups(case["groups"])
    trajectories = group.trajectories
    rows = make_rows(trajectories, [1.0] * len(trajectories), loss_weights(trajectories, "token"))
    shard = make_packer(settings, spec, sizes)(rows).shards[parallel.coordinates.data]
    trainer.routing.receive(shard)  # as `TrainerRank.perform` does
    if case["later"]:
        move_before_the_update(trainer, case["later"])
    metrics = trainer.train_step(shard, step=0, version=0)
    out, parameters = job["out"], trainer.weights.parameters
    # Buffers (the router's selection bias) have no gradient.
    gradients = {name: getattr(p, "main_grad", torch.zeros_like(p)) for name, p in parameters.items()}
    write_tensors(out / f"{case['name']}.safetensors", gradients, spec, parallel)
    write_tensors(out / f"{case['name']}.after.safetensors", parameters, spec, parallel)
    if parallel.rank == sizes.stage * (sizes.pipeline - 1):
        results = {"metrics": metrics, "microbatches": [sequences(batch) for batch in shard]}
        (out / f"{case['name']}.json").write_text(json.dumps(results))


def move_before_the_update(trainer: Any, path: str) -> None:
    """Change the weights once the old policy's passes are done, as a first update does before the second."""
    passes = trainer.passes.before_updates

    def before_updates(batches: list[MicroBatch]) -> Any:
        known = passes(batches)
        trainer.weights.load(path)
        return known

    trainer.passes.before_updates = before_updates


def sequences(batch: MicroBatch) -> list[list[int]]:
    """Token ids of each packed sequence, without padding."""
    ends = np.cumsum(batch.lengths)
    parts = [(batch.tokens[a:b], batch.padding[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return [tokens[~padding].tolist() for tokens, padding in parts if not padding.all()]


def train(job: dict[str, Any], rank: int) -> None:
    parallel = join(config(job, job["cases"][0]).trainer, rank, job["init_method"])
    for case in job["cases"]:
        run(job, case, parallel)
    leave(parallel)
