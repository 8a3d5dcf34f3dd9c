"""A reward model's run is refused where its pairs cannot come from, or where it was never proven."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slimx.config.schema import Config
from slimx.data.records import Prompt
from slimx.extras.preferences.head import declare_score, write_score
from slimx.extras.preferences.hook import check_pair
from slimx.extras.token_level.value_trainer import read_score
from slimx.models.families import configured_model
from tests.refusals import invalid, refused

MODEL = Path("configs/moe/models/Qwen3-30B-A3B")


def sections(**changes: Any) -> dict[str, Any]:
    """Returns a complete configuration of a reward model; `changes`: single keys, dots as `__`."""
    values: dict[str, Any] = {
        "run": {"dir": "r"},
        "model": {"path": str(MODEL)},
        "rollout": {"prompts": "p", "group_size": 2, "engines": []},
        "reward": {"function": None},
        "algorithm": {"name": "bradley_terry"},
        "eval": {"prompts": "held-out"},
    }
    values = copy.deepcopy(values)
    for name, value in changes.items():
        *path, last = name.split("__")
        at = values
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return values


@pytest.mark.parametrize(
    ("changes", "code", "about"),
    [
        ({"rollout__group_size": 4}, "reward_model.pairs", "rollout.group_size"),
        ({"rollout__engines": [{"name": "actor"}]}, "reward_model.pairs", "rollout.engines"),
        ({"reward__function": "exact"}, "reward_model.pairs", "reward.function"),
        ({"eval__samples": 2, "eval__temperature": 1.0}, "reward_model.eval", "eval.samples"),
        ({"eval__temperature": 1.0}, "reward_model.eval", "eval.temperature"),
        (
            {"eval__temperature": 1.0, "eval__prompts": {"a": {"path": "f", "top_p": 0.5}}},
            "reward_model.eval",
            "eval.temperature",
        ),
        ({"trainer__freeze": ["*"]}, "unproven", "trainer.freeze"),
        ({"trainer__lora": {"rank": 8, "alpha": 16}}, "unproven", "trainer.lora"),
        ({"trainer__moe__routing_replay": "R2"}, "unproven", "trainer.moe.routing_replay"),
        ({"trainer__moe__aux_loss_coef": 0.1}, "unproven", "trainer.moe.aux_loss_coef"),
        ({"critic": {}}, "algorithm.critic", "critic"),
        (
            {"trainer__overlap_param_gather": True, "schedule__updates_per_step": 2},
            "param_gather.effect",
            "trainer.overlap_param_gather",
        ),
    ],
)
def test_settings_without_meaning_for_a_reward_model_are_refused(changes, code, about):
    with invalid(code, about=about):
        Config.model_validate(sections(**changes))


def test_a_reward_model_evaluates_held_out_pairs_without_engines():
    spec = configured_model(Config.model_validate(sections()))
    assert "output_layer.weight" not in {row.name for row in spec.table.rows}
    assert "lm_head.weight" in spec.table.frozen


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({}, "hooks.pair"),
        ({"rejected": 3}, "hooks.pair"),
        ({"rejected": "right"}, "hooks.pair"),
        ({"rejected": "wrong", "margin": "big"}, "hooks.margin"),
        ({"rejected": "wrong", "margin": True}, "hooks.margin"),
        ({"rejected": "wrong", "margin": float("nan")}, "hooks.margin"),
    ],
)
def test_a_prompt_that_is_no_pair_is_refused_by_name(metadata, code):
    with refused(code, about="p7"):
        check_pair(Prompt(id="p7", messages=[], answer="right", metadata=metadata))


def test_a_pair_with_a_margin_is_taken():
    check_pair(Prompt(id="p", messages=[], answer="right", metadata={"rejected": "wrong", "margin": 1}))


def test_the_head_has_the_layout_of_sequence_classification(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4}))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert read_score(tmp_path) is None
    (tmp_path / "model.safetensors").unlink()
    head = np.arange(4, dtype=np.float32)[None]
    assert write_score(tmp_path / "model.safetensors", head) == ["score.weight"]
    assert read_score(tmp_path).tolist() == head.tolist()
    declare_score(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3MoeForSequenceClassification"]
    assert fields["num_labels"] == 1 and len(fields["id2label"]) == 1 and fields["hidden_size"] == 4
