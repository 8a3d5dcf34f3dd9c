"""Rules that need more than the configuration: the model, a machine, weights or a tokenizer.

`slimx plan`, `slimx doctor` and the start of a run ask those rules whose facts they have (`slimx.config.rule.broken`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx import entry_points
from slimx.config.rule import rules_in
from slimx.config.schema import Config
from slimx.layout.ranks import sizes_of
from slimx.models.families import ModelSpec
from slimx.models.trunk import read_trunk
from slimx.preflight.checks import (
    activations,
    batch,
    fp8,
    layout,
    lora,
    machine,
    policies,
    qat,
    reach,
    routing,
    serving,
    sparse,
    teacher,
    weights,
)

RULES = rules_in(
    layout,
    routing,
    sparse,
    lora,
    qat,
    fp8,
    activations,
    batch,
    serving,
    reach,
    machine,
    weights,
    teacher,
    policies,
    *entry_points.load_all("slimx.rules").values(),
)


def model_facts(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Facts that the configuration and the model's config.json bring."""
    view = None if config.critic is None else config.as_critic().trainer
    return config.sections | {
        "spec": spec,
        "sizes": sizes_of(config.trainer),
        "critic_view": view,
        "critic_spec": None if view is None else read_trunk(config.model),
        "critic_sizes": None if view is None else sizes_of(view),
    }


def weight_facts(config: Config) -> dict[str, Any]:
    """Facts of the directories that initial weights are read from."""
    teacher, adapted = config.algorithm.teacher, config.trainer.lora
    return {
        "weights": Path(config.initial_weights),
        "adapters": None if adapted is None or adapted.load is None else Path(adapted.load),
        "critic_weights": None if config.critic is None else Path(config.as_critic().initial_weights),
        "teacher_weights": None if teacher is None else Path(teacher),
    }
