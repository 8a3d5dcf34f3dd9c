"""Muon is refused by name where it cannot work or was never proven."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.config.schema import Config
from tests.refusals import invalid

MUON = {"optimizer": {"kind": "muon"}, "distributed_optimizer": False}


def config(trainer: dict[str, Any], **sections: Any) -> Config:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, **sections}
    return Config.model_validate({**values, "trainer": trainer})


def test_muon_without_shards_is_taken():
    assert config(MUON).trainer.optimizer.kind == "muon"


@pytest.mark.parametrize(
    ("code", "about", "trainer", "sections"),
    [
        ("muon.unused", "trainer.optimizer.muon", {"optimizer": {"muon": {"steps": 4}}}, {}),
        ("muon.distributed", "trainer.distributed_optimizer", {"optimizer": {"kind": "muon"}}, {}),
        ("muon.proven", "trainer.lora", {**MUON, "lora": {"rank": 4, "alpha": 8}}, {}),
        (
            "muon.proven",
            "trainer.optimizer.offload_fraction",
            {**MUON, "optimizer": {"kind": "muon", "offload_fraction": 0.5}},
            {},
        ),
        (
            "muon.proven",
            "critic.optimizer.kind",
            {},
            {"critic": {"optimizer": {"kind": "muon"}}, "algorithm": {"name": "ppo"}},
        ),
    ],
)
def test_what_muon_cannot_do_or_was_never_proven_with_is_refused(code, about, trainer, sections):
    with invalid(code, about=about):
        config(trainer, **sections)
