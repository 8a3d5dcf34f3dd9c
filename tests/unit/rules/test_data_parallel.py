"""Keys of exchanges between data-parallel ranks are refused where they have no effect or were never proven."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.config.schema import Config
from tests.refusals import invalid

GATHER, HALVED = {"overlap_param_gather": True}, {"grad_reduce_in_fp32": False}
SHORT = {"optimizer": {"moments_dtype": "bfloat16"}}
TWICE = {"schedule": {"updates_per_step": 2}}
PPO = {"algorithm": {"name": "ppo"}, "critic": {}}


def config(trainer: dict[str, Any], **sections: Any) -> Config:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, **sections}
    return Config.model_validate({**values, "trainer": trainer})


@pytest.mark.parametrize(("trainer", "sections"), [(GATHER, TWICE), (HALVED, {}), (SHORT, {}), (HALVED, PPO)])
def test_each_is_taken_where_it_was_proven(trainer, sections):
    config({**trainer, "world_size": 2}, **sections)


@pytest.mark.parametrize(
    ("code", "about", "trainer", "sections"),
    [
        ("param_gather.effect", "trainer.overlap_param_gather", GATHER, {}),
        ("param_gather.effect", "trainer.overlap_param_gather", GATHER | {"distributed_optimizer": False}, TWICE),
        ("unproven", "trainer.overlap_grad_reduce", GATHER | {"overlap_grad_reduce": False}, TWICE),
        ("unproven", "trainer.lora", GATHER | {"lora": {"rank": 4, "alpha": 8}}, TWICE),
        ("grad_reduce.dtype", "trainer.grad_reduce_in_fp32", HALVED, {"numerics": {"dtype": "float32"}}),
        (
            "unproven",
            "trainer.optimizer.kind",
            HALVED | {"optimizer": {"kind": "muon"}, "distributed_optimizer": False},
            {},
        ),
        ("unproven", "trainer.distributed_optimizer", SHORT | {"distributed_optimizer": False}, {}),
        (
            "unproven",
            "trainer.optimizer.offload_fraction",
            {"optimizer": {"moments_dtype": "bfloat16", "offload_fraction": 0.5}},
            {},
        ),
        ("unproven", "critic.optimizer.moments_dtype", {}, PPO | {"critic": SHORT}),
    ],
)
def test_ineffective_or_unproven_settings_are_refused(code, about, trainer, sections):
    with invalid(code, about=about):
        config(trainer, **sections)
