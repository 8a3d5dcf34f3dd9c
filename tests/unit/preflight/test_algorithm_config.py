"""A key of the algorithm is refused where it has no effect, presets can be overridden, and a user's own advantages and
loss are held to their contract."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.algorithms.inputs import LossInputs
from slimx.algorithms.losses import surrogates
from slimx.algorithms.losses.objective import make_loss
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.sections.algorithm import NEEDS, Algorithm
from slimx.config.sections.objectives import (
    LOSSES,
    OBJECTIVES,
    PRESETS,
    Clip,
    Clipped,
    Objective,
    Sapo,
    read_objective,
)
from tests.refusals import invalid, refused
from tests.unit.algorithms.advantage_stand import group

BASE: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}


@pytest.mark.parametrize(
    ("algorithm", "code", "about"),
    [
        ({"loss": {"kind": "sapo", "low": 0.1}}, "algorithm.unused", "algorithm.loss.low"),
        ({"loss": {"kind": "gspo", "dual": 3.0}}, "algorithm.unused", "algorithm.loss.dual"),
        ({"loss": {"tau_positive": 2.0}}, "algorithm.unused", "algorithm.loss.tau_positive"),
        ({"loss": {"share": 0.1}}, "algorithm.unused", "algorithm.loss.share"),
        ({"name": "kl_cov", "loss": {"covariance_low": 0.1}}, "algorithm.unused", "algorithm.loss.covariance_low"),
        (
            {"name": "rloo", "advantages": {"normalize_std": False}},
            "algorithm.unused",
            "algorithm.advantages.normalize_std",
        ),
        ({"advantages": {"normalize_std": False, "eps": 0.1}}, "algorithm.unused", "algorithm.advantages.eps"),
        ({"advantages": {"weights": {"a": 2.0}}}, "algorithm.unused", "algorithm.advantages.weights"),
        ({"advantages": {"step_coef": 2.0}}, "algorithm.unused", "algorithm.advantages.step_coef"),
        ({"name": "reinforce_pp", "advantages": {"lam": 0.9}}, "algorithm.unused", "algorithm.advantages.lam"),
        ({"advantages": {"gamma": 0.9}}, "algorithm.unused", "algorithm.advantages.gamma"),
        ({"advantages": {"whiten": True}}, "algorithm.unused", "algorithm.advantages.whiten"),
        ({"reference": True, "kl_reward_coef": 0.1}, "algorithm.unused", "algorithm.kl_reward_coef"),
        ({"kl_estimator": "k2"}, "algorithm.unused", "algorithm.kl_estimator"),
        ({"kl_unbiased": True}, "algorithm.unused", "algorithm.kl_unbiased"),
        (
            {"name": "reinforce_pp", "kl_reward_estimator": "k3"},
            "algorithm.unused",
            "algorithm.kl_reward_estimator",
        ),
        ({"kl_coef": 0.1}, "algorithm.reference", "algorithm.kl_coef"),
        (
            {"kl_coef": 0.1, "reference": True, "kl_estimator": "k1"},
            "algorithm.kl_estimator",
            "algorithm.kl_estimator",
        ),
        ({"name": "sft", "entropy_coef": 0.1}, "algorithm.unused", "algorithm.entropy_coef"),
        ({"name": "sft", "teacher": "t"}, "algorithm.unused", "algorithm.teacher"),
        ({"name": "dpo", "old_logprobs": "recompute"}, "algorithm.unused", "algorithm.old_logprobs"),
        ({"name": "bradley_terry", "aggregation": "sample"}, "algorithm.unused", "algorithm.aggregation"),
        ({"name": "bradley_terry", "reference": True}, "algorithm.unused", "algorithm.reference"),
        ({"loss": "bradley_terry"}, "algorithm.sft_advantages", "algorithm.advantages"),
        ({"name": "dpo", "aggregation": "token"}, "algorithm.dpo_loss", "algorithm.loss"),
        ({"name": "dpo", "reference": False}, "algorithm.dpo_reference", "algorithm.reference"),
        ({"name": "distillation"}, "algorithm.no_teacher", "algorithm.teacher_coef"),
        ({"advantages": "none"}, "algorithm.no_advantages", "algorithm.advantages"),
        ({"loss": "sft"}, "algorithm.sft_advantages", "algorithm.advantages"),
        (
            {"correction": {"kind": "truncate"}},
            "algorithm.old_logprobs",
            "algorithm.correction",
        ),
        ({"correction": {"high": 3.0}}, "correction.kind", "algorithm.correction.kind"),
        (
            {"old_logprobs": "recompute", "correction": {"kind": "icepop", "low": 1.5}},
            "correction.bounds",
            "algorithm.correction",
        ),
        ({"advantages": "vtrace"}, "algorithm.unknown", "algorithm.advantages"),
        ({"loss": "hinge"}, "algorithm.unknown", "algorithm.loss"),
        ({"loss": {"kind": "hinge"}}, "algorithm.unknown", "algorithm.loss"),
        ({"loss": None}, "algorithm.unknown", "algorithm.loss"),
        ({"loss": {"hihg": 0.3}}, "algorithm.unused", "algorithm.loss.hihg"),
        ({"loss": {"kind": "my.loss", "high": 0.3}}, "algorithm.unused", "algorithm.loss.high"),
        ({"credit": "equal"}, "algorithm.unknown", "algorithm.credit"),
        ({"loss": "my.loss", "kl_coef": 0.1, "reference": True}, "algorithm.unused", "algorithm.kl_coef"),
    ],
)
def test_a_key_without_an_effect_is_refused(algorithm, code, about):
    with invalid(code, about=about):
        Config.model_validate(BASE | {"algorithm": algorithm})


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValidationError) as caught:
        Algorithm(name="ppo2")
    assert [error["loc"] for error in caught.value.errors()] == [("name",)]


@pytest.mark.parametrize(
    ("sections", "code", "about"),
    [
        ({"rollout": {"prompts": "p", "group_size": 1}}, "algorithm.group_size", "rollout.group_size"),
        (
            {"algorithm": {"name": "dpo"}, "schedule": {"updates_per_step": 2}},
            "algorithm.dpo_updates",
            "schedule.updates_per_step",
        ),
        (
            {"algorithm": {"name": "dpo"}, "rollout": {"prompts": "p", "engines": []}},
            "algorithm.dpo_pairs",
            "rollout.group_size",
        ),
        ({"algorithm": {"reference_refresh": 2}}, "algorithm.unused", "algorithm.reference_refresh"),
        (
            {"algorithm": {"name": "dpo"}, "trainer": {"moe": {"routing_replay": "R2"}}},
            "algorithm.dpo_routes",
            "trainer.moe.routing_replay",
        ),
        ({"reward": {"function": None}}, "algorithm.reward", "reward.function"),
        ({"algorithm": {"advantages": "gae"}}, "algorithm.critic", "algorithm.name"),
    ],
)
def test_settings_that_other_sections_contradict_are_refused(sections, code, about):
    with invalid(code, about=about):
        Config.model_validate(BASE | sections)


@pytest.mark.parametrize(("key", "value"), [("temperature", 0), ("temperature", 1e-7), ("top_k", 1), ("top_p", 1e-6)])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "rloo", "opo", "gpg", "gdpo", "gigpo", "dpo", "remax"])
def test_greedy_rollouts_are_refused_where_they_are_compared(name, key, value):
    with invalid("algorithm.greedy", about=f"rollout.sampling.{key}"):
        Config.model_validate(
            BASE | {"algorithm": {"name": name}, "rollout": {"prompts": "p", "sampling": {key: value}}}
        )


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "reinforce_pp"}},
        {"algorithm": {"name": "ppo"}, "critic": {}},
        {"algorithm": {"name": "grpo", "teacher": "t", "teacher_coef": 1.0}},
    ],
)
def test_greedy_rollouts_are_taken_where_nothing_compares_them(sections):
    rollout = {"prompts": "p", "sampling": {"temperature": 0}}
    assert Config.model_validate(BASE | {"rollout": rollout} | sections).rollout.sampling.greedy == {"temperature": 0}


def test_held_out_answers_may_be_greedy_and_demonstrations_sample_nothing():
    assert Config.model_validate(BASE | {"eval": {"temperature": 0}}).rollout.sampling.greedy == {}
    rollout = {"prompts": "p", "engines": [], "sampling": {"temperature": 0}}
    Config.model_validate(BASE | {"algorithm": {"name": "sft"}, "rollout": rollout})


@pytest.mark.parametrize("name", PRESETS)
def test_each_value_of_a_preset_can_be_overridden(name):
    teacher = {"teacher": "t"} if name == "distillation" else {}
    algorithm = Algorithm(name=name, **teacher)
    for key, value in PRESETS[name].items():
        expected = read_objective(key, value) if key in OBJECTIVES else value
        assert getattr(algorithm, key) == expected != getattr(Algorithm(), key)
    # Trainer ranks get the configuration as it was written out, with every key.
    assert Algorithm.model_validate(algorithm.model_dump()) == algorithm
    assert Algorithm(name="gspo", loss={"high": 0.1}).loss == Clipped(kind="gspo", low=3e-4, high=0.1)
    correction = Algorithm(name="decoupled_ppo", correction={"high": 10.0}).correction
    assert (correction.kind, correction.low, correction.high) == ("icepop", 0.0, 10.0)
    assert NEEDS.keys() <= type(algorithm).model_fields.keys()


def test_a_kind_takes_from_the_preset_only_the_parameters_that_it_has():
    assert Algorithm(name="dapo", loss={"low": 0.1}).loss == Clip(kind="clip", low=0.1, high=0.28)
    assert Algorithm(name="dapo", loss="gspo").loss == Clipped(kind="gspo", high=0.28)
    assert Algorithm(name="dapo", loss={"kind": "sapo", "tau_positive": 2.0}).loss == Sapo(kind="sapo", tau_positive=2)
    assert Algorithm(name="dr_grpo", advantages="rloo").advantages == Objective(kind="rloo")
    assert Algorithm(name="dapo", loss="my.loss").loss == Objective(kind="my.loss")


def test_a_loss_takes_the_parameters_of_its_record():
    for kind, record in LOSSES.items():
        if kind not in ("sft", "bradley_terry"):
            parameters = signature(getattr(surrogates, kind)).parameters
            keywords = {name for name, parameter in parameters.items() if parameter.kind == Parameter.KEYWORD_ONLY}
            assert keywords <= {*record.model_fields}, kind


@pytest.mark.parametrize(
    ("loss", "overrides", "expected"),
    [
        (None, ["algorithm.loss.high=0.3"], Clip(kind="clip", high=0.3)),
        ("sapo", ["algorithm.loss.tau_positive=2"], Sapo(kind="sapo", tau_positive=2)),
        ({"kind": "sapo", "tau_positive": 2}, ["algorithm.loss=gspo"], Clipped(kind="gspo")),
        ({"high": 0.3}, ["algorithm.loss=null"], Clip(kind="clip")),
    ],
)
def test_overrides_change_one_parameter_or_the_kind(tmp_path, loss, overrides, expected):
    algorithm = {} if loss is None else {"algorithm": {"loss": loss}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE | algorithm))
    assert load_config(tmp_path / "run.yaml", overrides).algorithm.loss == expected


def test_a_parameter_without_a_kind_survives_an_override_of_the_kind(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE | {"algorithm": {"loss": {"high": 0.3}}}))
    assert load_config(tmp_path / "run.yaml", ["algorithm.loss=gspo"]).algorithm.loss == Clipped(kind="gspo", high=0.3)
    with refused("algorithm.unused", about="algorithm.loss.high"):
        load_config(tmp_path / "run.yaml", ["algorithm.loss=sapo"])


def test_an_override_for_another_kind_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE | {"algorithm": {"loss": "sapo"}}))
    with refused("algorithm.unused", about="algorithm.loss.high") as caught:
        load_config(tmp_path / "run.yaml", ["algorithm.loss.high=0.3"])
    assert "override 'algorithm.loss.high=0.3'" in str(caught.value)


# Hooks ----------------------------------------------------------------------------------------------------------------

HERE = "tests.unit.preflight.test_algorithm_config"


def custom_advantages(groups):
    return [2 * t.reward for g in groups for t in g.trajectories]


def arrays(groups):
    return [np.full(4, t.reward) for g in groups for t in g.trajectories]


def too_few(groups):
    return [0.0]


def not_finite(groups):
    return [float("nan")] * 2


def custom_loss(inputs):
    return -(inputs.weight * inputs.logprobs).sum(), {"loss/own": inputs.weight.sum()}


def no_gradient(inputs):
    return inputs.weight.sum(), {}


def alone(inputs):
    return inputs.logprobs.sum()


def live_metric(inputs):
    return inputs.logprobs.sum(), {"loss/own": inputs.logprobs.sum()}


def test_own_advantages_are_taken_as_numbers_or_arrays():
    assert all_advantages(Algorithm(advantages=f"{HERE}.custom_advantages"), [group("a", [1.0, 0.5])]) == [2.0, 1.0]
    found = all_advantages(Algorithm(advantages=f"{HERE}.arrays"), [group("a", [1.0, 0.5])])
    assert [x.tolist() for x in found] == [[1.0] * 4, [0.5] * 4]


@pytest.mark.parametrize(
    ("path", "code", "about"),
    [
        ("too_few", "hook.advantages_result", f"{HERE}.too_few"),
        ("not_finite", "hook.advantages_value", "a/0"),
    ],
)
def test_advantages_that_break_the_contract_are_refused(path, code, about):
    with refused(code, about=about):
        all_advantages(Algorithm(advantages=f"{HERE}.{path}"), [group("a", [1.0, 0.5])])


def test_a_hook_that_is_not_there_is_refused_by_name():
    with refused("dotted.missing", about="algorithm.advantages"):
        all_advantages(Algorithm(advantages=f"{HERE}.nothing"), [group("a", [1.0, 0.5])])


def inputs() -> LossInputs:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, ones = lp.detach(), torch.ones(2)
    return LossInputs(logprobs=lp, weight=ones, advantages=ones, old_logprobs=old, rollout_logprobs=old)


def test_a_custom_loss_is_the_whole_loss():
    loss, metrics = make_loss(Algorithm(loss=f"{HERE}.custom_loss"))(inputs())
    assert loss.item() == 3.0 and metrics["loss/own"].item() == 2.0


@pytest.mark.parametrize(
    ("path", "code", "about"),
    [
        ("no_gradient", "hook.loss_tensor", f"{HERE}.no_gradient"),
        ("alone", "hook.loss_result", f"{HERE}.alone"),
        ("live_metric", "hook.loss_metric", "loss/own"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused(path, code, about):
    with refused(code, about=about):
        make_loss(Algorithm(loss=f"{HERE}.{path}"))(inputs())
