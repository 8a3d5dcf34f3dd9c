"""Every term of every preset changes the gradient of the probe batch, and one that cannot is named with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimx.cli import app
from slimx.config.schema import Config
from slimx.config.sections.general import Model
from slimx.config.sections.objectives import PRESETS
from slimx.config.sections.trainer import Trainer
from slimx.extras.doctor.effects.effects import Effect, effects
from tests.extras.doctor.effects_stand import config
from tests.refusals import refused

CONFIGS = Path(__file__).parents[3] / "configs" / "moe"


def by_key(found: list[Effect]) -> dict[str, Effect]:
    return {effect.key.split(".")[-1]: effect for effect in found}


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "bradley_terry"])
def test_every_term_of_a_preset_changes_the_gradient(name):
    algorithm = {"name": name} | ({"teacher": "t"} if name == "distillation" else {})
    found = effects(config(algorithm, updates_per_step=1 if name == "dpo" else 2))
    assert found
    assert [effect for effect in found if not effect.share] == []
    # Settings of the preset that differ from GRPO's defaults are examined.
    looked = by_key(found).keys() | {"loss", "reference", "kind"}
    neutral = {"normalize_std": False, "advantages": "none", "low": 1.0}
    keys = [(key, value) for key, value in PRESETS[name].items() if not isinstance(value, dict)]
    keys += [pair for value in PRESETS[name].values() if isinstance(value, dict) for pair in value.items()]
    assert {key for key, value in keys if neutral.get(key) != value} <= looked


def test_every_optional_term_changes_the_gradient():
    algorithm = {
        "loss": {"dual": 1.5},
        "reference": True,
        "kl_coef": 0.1,
        "kl_unbiased": True,
        "entropy_coef": 0.01,
        "teacher": "t",
        "teacher_coef": 0.1,
        "old_logprobs": "recompute",
        "correction": {"kind": "truncate", "level": "sequence", "low": 0.5},
        "rejection": {"level": "token", "low": 0.5},
        "opsm_delta": 0.01,
        "aggregation": "prompt",
        "mask_stale_tokens": True,
    }
    found = by_key(effects(config(algorithm, updates_per_step=2, max_staleness=1)))
    assert {*algorithm, "dual", "kl_estimator"} - {"loss", "reference", "teacher"} <= found.keys()
    assert all(effect.share for effect in found.values())
    rewards = {"name": "ppo", "reference": True, "kl_reward_coef": 0.1, "advantages": {"gamma": 0.9, "lam": 0.9}}
    found = by_key(effects(config(rewards, updates_per_step=2)))
    assert {"kl_reward_coef", "gamma", "lam", "whiten", "value_clip"} <= found.keys()
    assert all(effect.share for effect in found.values())


def test_settings_without_effect_are_named_with_the_reason():
    """Takes one update on recomputed log-probs: the ratio is 1, the values are the old ones."""
    algorithm = {"name": "ppo", "old_logprobs": "recompute", "loss": {"dual": 3.0}, "entropy_coef": 0.1}
    found = by_key(effects(config(algorithm)))
    silent = {key for key, effect in found.items() if not effect.share}
    assert silent == {"low", "high", "dual", "value_clip"}
    assert "ratio is 1" in found["dual"].reason and found["dual"].chosen
    assert "old" in found["value_clip"].reason and not found["value_clip"].chosen
    assert not any(by_key(effects(config(algorithm, updates_per_step=2)))[key].share == 0 for key in silent)


def test_a_group_of_one_is_a_warning_with_a_teacher():
    settings = config({"teacher": "t", "teacher_coef": 1.0})
    alone = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"group_size": 1})})
    effect = by_key(effects(alone))["advantages"]
    assert effect.share == 0 and "rollout.group_size is 1" in effect.reason


MODELS = CONFIGS / "models"
"""Folder with configurations of a model with a softmax router, and of one with sigmoids."""


@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("grpo", "seq_aux_loss", "Qwen3-30B-A3B"),
        ("sft", "aux_loss", "Qwen3-30B-A3B"),
        ("grpo", "global_aux_loss", "DeepSeek-V3"),
    ],
)
def test_losses_of_the_router_change_its_gradient(name, kind, model):
    moe = {"aux_loss_coef": 1e-3, "aux_loss_type": kind, "z_loss_coef": 1e-4}
    found = by_key(effects(routed(MODELS / model, moe, name)))
    assert [(found[key].value, found[key].chosen) for key in ("aux_loss_coef", "z_loss_coef")] == [
        (1e-3, True),
        (1e-4, True),
    ]
    assert 0 < found["aux_loss_coef"].share < 1 and 0 < found["z_loss_coef"].share < 1
    assert not {"aux_loss_coef", "z_loss_coef"} & by_key(effects(routed(MODELS / model, {}, name))).keys()


def test_a_loss_of_the_router_that_does_nothing_is_named_with_its_reason(tmp_path):
    """Uses even load, as every token takes every expert, and a coefficient of 1e-20, below the rounding of fp64."""
    values = json.loads((MODELS / "Qwen3-30B-A3B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_experts": 8, "num_experts_per_tok": 8}))
    found = by_key(effects(routed(tmp_path, {"aux_loss_coef": 0.1, "z_loss_coef": 1e-20}, "grpo")))
    assert found["aux_loss_coef"].share == 0 and "8 experts" in found["aux_loss_coef"].reason
    assert found["z_loss_coef"].share == 0 and "lost in rounding" in found["z_loss_coef"].reason
    routing = ("expert", "router", "moe_", "topk", "sparse", "mlp_only")
    dense = {name: value for name, value in values.items() if not any(part in name for part in routing)}
    dense |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with refused("routing.moe_layers", about="trainer.moe.z_loss_coef"):
        effects(routed(tmp_path, {"z_loss_coef": 0.1}, "grpo"))


def routed(model: Path, moe: dict[str, Any], name: str) -> Config:
    settings = config({"name": name})
    trainer = Trainer.model_validate({"moe": moe})
    return settings.model_copy(update={"trainer": trainer, "model": Model(path=str(model))})


def test_functions_of_the_user_are_inspected():
    here = "tests.integration.hooks"
    hooks = {"advantages": f"{here}.rewards_as_advantages", "loss": f"{here}.weighted_loss", "aggregation": "sample"}
    found = by_key(effects(config(hooks)))
    assert found.keys() == {"loss", "advantages", "aggregation"} and all(effect.share for effect in found.values())


def test_the_command_says_it_and_fails_for_a_chosen_term_that_does_nothing():
    runner = CliRunner()
    whole = runner.invoke(app, ["doctor", str(CONFIGS / "quickstart.yaml"), "--effects"])
    assert whole.exit_code == 0 and "NOTHING" not in whole.stdout and "algorithm.loss.high" in whole.stdout
    overrides = ["algorithm.old_logprobs=recompute", "algorithm.loss.dual=3"]
    result = runner.invoke(app, ["doctor", str(CONFIGS / "quickstart.yaml"), "--effects", *overrides])
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "loss.dual" in line]
    assert "NOTHING: with algorithm.old_logprobs=recompute" in line
