"""The trainer rank of test_run's served teacher: a step on the same rollouts, scored by the teacher in the trainer and
by the one that an engine served.

    python -m tests.integration.teacher_rank JOB.json 0

Writes `scores.npz`: the trainer's teacher's log-probs of each rollout in order; and `said.json`: of both steps the
metrics, and the largest difference of their gradients over the largest gradient.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.saved.codec import load_groups
from slimx.orchestration.batches import make_packer
from tests.integration import rank_start


def config_of(job: dict[str, Any], **teacher: str) -> Config:
    engines = [{}, {"name": "wise", "frozen": True, "model": job["teacher"]}]
    return Config.model_validate(
        {
            "run": {"dir": job["out"]},
            "model": {"path": job["policy"]},
            "numerics": {"dtype": "float32"},
            "trainer": {"distributed_optimizer": False, "max_tokens_per_microbatch": 64},
            "rollout": {"prompts": "p", "engines": engines},
            "algorithm": {"name": "distillation", **teacher},
        }
    )


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    out = Path(job["out"])
    configs = {
        "trainer": config_of(job, teacher=job["teacher"]),
        "engine": config_of(job, teacher_engine="wise"),
    }
    parallel = rank_start.join(configs["trainer"].trainer, rank, job["init_method"])
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer

    spec = read_model(job["policy"])
    trajectories = [trajectory for group in load_groups(out / "groups.bin") for trajectory in group.trajectories]
    weights, nothing = loss_weights(trajectories, "token"), [0.0] * len(trajectories)
    said: dict[str, Any] = {}
    gradients: dict[str, dict[str, np.ndarray]] = {}
    for name, config in configs.items():
        trainer = PolicyTrainer(config, spec, parallel)
        rows = make_rows(trajectories, nothing, weights, config.algorithm)
        batch = make_packer(config, spec, parallel.sizes)(rows)
        if name == "trainer":
            scores = batch.unpack([trainer.logprobs(batch.shards[0], under="teacher")], rows)
            np.savez(out / "scores.npz", *scores)
        said[name] = trainer.train_step(batch.shards[0], step=0, version=0)
        gradients[name] = {key: p.main_grad.numpy().copy() for key, p in trainer.weights.parameters.items()}
    largest = max(np.abs(gradient).max() for gradient in gradients["trainer"].values())
    differences = [np.abs(gradients["engine"][key] - gradient).max() for key, gradient in gradients["trainer"].items()]
    said["gradients_differ"] = float(max(differences) / largest)
    (out / "said.json").write_text(json.dumps(said))
    rank_start.leave(parallel)


if __name__ == "__main__":
    main()
