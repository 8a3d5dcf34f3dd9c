"""Steps whose micro-batches are full and whose experts have even load, as a plan reckons with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainingRow
from slimx.data.packing import pack
from slimx.layout.ranks import Sizes

Case = dict[str, Any]


def config(job: dict[str, Any], model: str, case: Case) -> Config:
    """Returns a case's configuration: `length` tokens a rollout, `dtype`, fields of the trainer, full micro-batches."""
    rollouts = job["rollouts"]
    return Config.model_validate(
        {
            "run": {"dir": str(job["out"])},
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
    """Returns this data-parallel rank's part of a step in which every rollout has the greatest length and every expert
    gets as many tokens: a plan reckons with even load, and random routers are far from it."""
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
