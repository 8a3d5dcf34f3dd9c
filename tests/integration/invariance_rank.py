"""One gloo rank of test_invariance: one step on the same data for each model and its algorithm, under one layout.

    python -m tests.integration.invariance_rank JOB.json RANK

The last rank writes MODEL.json (metrics and the number of micro-batches), all together MODEL.safetensors (gradients by
Hugging Face name).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.saved.codec import load_groups
from slimx.orchestration.batches import make_packer
from tests.integration.gathering import write_tensors
from tests.integration.rank_start import join, leave

VERSION = 3
"""The engines' weight version at the step."""


def config(job: dict[str, Any], model: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": job["out"]},
            "model": {"path": model["path"]},
            "numerics": {"dtype": "float32"},
            "trainer": {
                **job["trainer"],
                # Every rank then holds whole gradients.
                "distributed_optimizer": False,
                # Several chunks, of which the last is not full.
                "logprob_chunk_tokens": 24,
                "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
                "megatron": {"mtp_num_layers": model["mtp"]} if model["mtp"] else {},
            },
            "rollout": {"prompts": "p"},
            "algorithm": {"reference": True, "kl_coef": 0.5, "teacher": model["teacher"], **model["algorithm"]},
        }
    )


def run(job: dict[str, Any], model: dict[str, Any], parallel: Any) -> None:
    import torch

    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer

    settings = config(job, model)
    spec = read_model(model["path"], mtp_layers=model["mtp"])
    trainer = PolicyTrainer(settings, spec, parallel)
    trainer.weights.load(model["policy"])  # another than the reference
    groups = load_groups(model["groups"])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = [value for group in groups for value in group_advantages(settings.algorithm, group)]
    rows = make_rows(trajectories, advantages, loss_weights(trajectories, "token"))
    sizes = parallel.sizes
    batch = make_packer(settings, spec, sizes)(rows)
    shard = batch.shards[parallel.coordinates.data]
    metrics = trainer.train_step(shard, step=0, version=VERSION)
    out, name = Path(job["out"]), model["name"]
    if parallel.rank == sizes.world - 1:
        (out / f"{name}.json").write_text(json.dumps({"metrics": metrics, "microbatches": len(shard)}))
    gradients = {
        # Buffers (the router's selection bias) have none.
        key: parameter.main_grad if hasattr(parameter, "main_grad") else torch.zeros_like(parameter)
        for key, parameter in trainer.weights.parameters.items()
    }
    write_tensors(out / f"{name}.safetensors", gradients, spec, parallel)


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    parallel = join(config(job, job["models"][0]).trainer, rank, job["init_method"])
    for model in job["models"]:
        run(job, model, parallel)
    leave(parallel)


if __name__ == "__main__":
    main()
