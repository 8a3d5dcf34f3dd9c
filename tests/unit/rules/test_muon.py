"""Muon is refused by name where it cannot work or was never proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimx.config.schema import Config
from slimx.config.sections.trainer import CYCLE
from tests.refusals import invalid

MUON = {"optimizer": {"kind": "muon"}, "distributed_optimizer": False}


def config(trainer: dict[str, Any], **sections: Any) -> Config:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, **sections}
    return Config.model_validate({**values, "trainer": trainer})


def test_muon_without_shards_is_taken():
    assert config(MUON).trainer.optimizer.kind == "muon"


@pytest.mark.parametrize("steps", [1, 4, 6, 7, 11])
def test_a_part_of_a_cycle_of_coefficients_is_refused(steps):
    with invalid("muon.steps", about="trainer.optimizer.muon.steps"):
        config({**MUON, "optimizer": {"kind": "muon", "muon": {"steps": steps}}})


def test_only_whole_cycles_leave_singular_values_near_1():
    muon = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    matrix = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    for steps, near in ((CYCLE, True), (2 * CYCLE, True), (CYCLE + 1, False)):
        values = torch.linalg.svdvals(muon.newton_schulz(matrix, steps, "quintic"))
        assert bool(((values > 0.9) & (values < 1.1)).all()) == near, (steps, values)
        if near:
            assert config({**MUON, "optimizer": {"kind": "muon", "muon": {"steps": steps}}})


@pytest.mark.parametrize(
    ("code", "about", "trainer", "sections"),
    [
        ("muon.unused", "trainer.optimizer.muon", {"optimizer": {"muon": {"steps": 10}}}, {}),
        ("muon.distributed", "trainer.distributed_optimizer", {"optimizer": {"kind": "muon"}}, {}),
        ("unproven", "trainer.lora", {**MUON, "lora": {"rank": 4, "alpha": 8}}, {}),
        (
            "unproven",
            "trainer.optimizer.offload_fraction",
            {**MUON, "optimizer": {"kind": "muon", "offload_fraction": 0.5}},
            {},
        ),
        (
            "unproven",
            "critic.optimizer.kind",
            {},
            {"critic": {"optimizer": {"kind": "muon"}}, "algorithm": {"name": "ppo"}},
        ),
    ],
)
def test_impossible_or_unproven_settings_of_muon_are_refused(code, about, trainer, sections):
    with invalid(code, about=about):
        config(trainer, **sections)
