"""One gloo rank of test_plan_memory: what real trainers hold, and the most that is alive in a step.

    python -m tests.integration.memory_rank JOB.json RANK

`RANK.json` has, per model and case: bytes of weights, gradients and optimizer state after two steps (`sizes` of the
trainer's Offload), and the peak of all tensors that the second step made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainingRow
from slimx.data.packing import pack
from slimx.layout.ranks import Sizes
from tests.integration.rank_start import join, leave

Case = dict[str, Any]


def config(job: dict[str, Any], model: str, case: Case) -> Config:
    """Of a case: `length` tokens a rollout, `dtype`, and fields of the trainer. Its micro-batches are full."""
    rollouts = job["rollouts"]
    return Config.model_validate(
        {
            "run": {"dir": job["out"]},
            "model": {"path": str(Path(job["models"]) / model)},
            "numerics": {"dtype": case.get("dtype", "bfloat16")},
            "cluster": {"device": "cpu"},
            "trainer": {
                "max_tokens_per_microbatch": case["tokens"],
                "moe": {"routing_replay": "R3"},
                **job["layout"],
                **case.get("trainer", {}),
            },
            "rollout": {
                "prompts": "p",
                "prompts_per_step": 1,
                "group_size": rollouts * case["tokens"] // case["length"],
                "max_prompt_tokens": 1,
                "sampling": {"max_new_tokens": case["length"]},
            },
        }
    )


def micro_batches(settings: Config, sizes: Sizes, data: int) -> list[MicroBatch]:
    """This data-parallel rank's part of a step in which every rollout has the greatest length and every expert gets as
    many tokens: a plan reckons with even load, and random routers are far from it."""
    from slimx.models.families import read_model
    from slimx.preflight.facts import route_shape

    shape = route_shape(read_model(settings.model.path))
    length, count = settings.rollout.sampling.max_new_tokens, settings.rollout.group_size
    random = np.random.default_rng(1)
    turns = np.arange(length * shape.topk).reshape(length, 1, shape.topk) % shape.experts
    routes = np.repeat(turns, shape.layers, axis=1).astype(np.uint8)
    rows = [
        TrainingRow(
            tokens=random.integers(1, 120, length),
            labels=random.integers(1, 120, length),
            weight=np.full(length, 1 / (length * count), np.float32),
            advantages=np.ones(length, np.float32),
            rollout_logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int64),
            temperature=np.ones(length, np.float32),
            routed_experts=routes,
        )
        for _ in range(count)
    ]
    return pack(
        rows,
        data_size=sizes.data,
        max_tokens=settings.trainer.max_tokens_per_microbatch,
        multiple_of=sizes.tensor * sizes.context,
        sequence_multiple=sizes.sequence_multiple,
        count_multiple=sizes.pipeline if sizes.virtual > 1 else 1,
    ).shards[data]


def measure(settings: Config, parallel: Any) -> dict[str, int]:
    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer
    from tests.integration.live_memory import LiveMemory

    spec = read_model(settings.model.path, mtp_layers=settings.trainer.megatron.get("mtp_num_layers") or 0)
    trainer = PolicyTrainer(settings, spec, parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    trainer.train_step(batches, step=0, version=1)
    with LiveMemory() as live:
        trainer.train_step(batches, step=1, version=1)
    return {"micro_batches": len(batches), "live": live.peak, **trainer.offloading.sizes()}


def measure_critic(settings: Config, parallel: Any) -> dict[str, int]:
    from slimx.extras.token_level.critic import CriticTrainer

    critic = CriticTrainer(settings, parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    for batch in batches:
        batch.values = np.zeros(len(batch.tokens), np.float32)
        batch.returns = np.ones(len(batch.tokens), np.float32)  # without a gradient the optimizer takes no step
    critic.train_step(batches, step=0)
    return critic.offloading.sizes()


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    cases = [(model, case, config(job, model, case)) for model, cases in job["cases"].items() for case in cases]
    parallel = join(cases[0][2].trainer, rank, job["init_method"])
    said = [measure(settings, parallel) for _, _, settings in cases]
    critics = []
    for model in job["critics"]:
        settings = config(job, model, {"length": 32, "tokens": 64})
        ppo = settings.model_dump() | {"algorithm": {"name": "ppo"}, "critic": {}}
        critics.append(measure_critic(Config.model_validate(ppo), parallel))
    (Path(job["out"]) / f"{rank}.json").write_text(json.dumps({"cases": said, "critics": critics}))
    leave(parallel)


if __name__ == "__main__":
    main()
