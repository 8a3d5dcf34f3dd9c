"""A key of the algorithm is refused where it has no effect, presets can be overridden, and a user's own advantages and
loss are held to their contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.algorithms.inputs import LossInputs
from slimx.algorithms.losses.objective import make_loss
from slimx.config.algorithm import NEEDS, Algorithm
from slimx.config.presets import PRESETS
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.preflight.effects.probe import try_hooks
from tests.refusals import refused
from tests.unit.algorithms.advantage_stand import group

BASE: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}


def refusal(**sections: Any) -> str:
    with pytest.raises(ValueError) as refused:
        Config.model_validate({**BASE, **sections})
    return str(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ({"loss": "sapo", "clip_low": 0.1}, "algorithm.clip_low belongs to algorithm.loss=clip or gspo"),
        ({"loss": "gspo", "dual_clip": 3.0}, "algorithm.dual_clip belongs to algorithm.loss=clip"),
        ({"sapo_tau_positive": 2.0}, "algorithm.sapo_tau_positive belongs to algorithm.loss=sapo"),
        ({"cov_share": 0.1}, "algorithm.cov_share belongs to algorithm.loss=clip_cov or kl_cov"),
        ({"name": "kl_cov", "cov_low": 0.1}, "algorithm.cov_low belongs to algorithm.loss=clip_cov"),
        ({"name": "rloo", "normalize_std": False}, "algorithm.normalize_std belongs to algorithm.advantages=grpo"),
        ({"normalize_std": False, "advantage_eps": 0.1}, "algorithm.advantage_eps is added to a standard deviation"),
        ({"reward_weights": {"a": 2.0}}, "algorithm.reward_weights belongs to algorithm.advantages=gdpo"),
        ({"step_coef": 2.0}, "algorithm.step_coef belongs to algorithm.advantages=gigpo"),
        ({"name": "reinforce_pp", "gae_lambda": 0.9}, "algorithm.gae_lambda belongs to algorithm.advantages=gae"),
        ({"gamma": 0.9}, "algorithm.gamma belongs to algorithm.advantages=gae or reinforce"),
        ({"whiten": True}, "algorithm.whiten belongs to algorithm.advantages=reinforce"),
        ({"reference": True, "kl_reward_coef": 0.1}, "algorithm.kl_reward_coef belongs to algorithm.advantages="),
        ({"kl_estimator": "k2"}, "algorithm.kl_estimator needs a positive algorithm.kl_coef"),
        ({"kl_unbiased": True}, "algorithm.kl_unbiased needs a positive algorithm.kl_coef"),
        (
            {"name": "reinforce_pp", "kl_reward_estimator": "k3"},
            "algorithm.kl_reward_estimator needs a positive algorithm.kl_reward_coef",
        ),
        ({"kl_coef": 0.1}, "set algorithm.reference=true"),
        (
            {"kl_coef": 0.1, "reference": True, "kl_estimator": "k1"},
            "in a loss its gradient has mean 0 whatever the reference",
        ),
        ({"name": "sft", "entropy_coef": 0.1}, "algorithm.entropy_coef is a term of the policy-gradient losses"),
        ({"name": "sft", "teacher": "t"}, "algorithm.teacher is compared with a policy's rollouts"),
        ({"name": "dpo", "old_logprobs": "recompute"}, "algorithm.old_logprobs is what the ratio compares with"),
        ({"name": "dpo", "aggregation": "token"}, "dpo needs algorithm.advantages=dpo, loss=plain and aggregation=sum"),
        ({"name": "dpo", "reference": False}, "algorithm.advantages is dpo, which compares with a reference"),
        ({"name": "distillation"}, "algorithm.teacher_coef is positive but there is no teacher"),
        ({"advantages": "none"}, "every advantage would be 0"),
        ({"loss": "sft"}, "algorithm.loss=sft looks at no advantages"),
        (
            {"correction": {"kind": "truncate"}},
            "both would be the same; set algorithm.old_logprobs=recompute",
        ),
        ({"correction": {"high": 3.0}}, "set algorithm.correction.kind"),
        (
            {"old_logprobs": "recompute", "correction": {"kind": "icepop", "low": 1.5}},
            "keeps weights in [1.5, 2], which does not hold 1",
        ),
        ({"advantages": "vtrace"}, "algorithm.advantages is vtrace, which is none of grpo, rloo"),
        ({"loss": "hinge"}, "algorithm.loss is hinge, which is none of clip, gspo"),
        ({"loss": "my.loss", "kl_coef": 0.1, "reference": True}, "algorithm.kl_coef is a term of the policy-gradient"),
        ({"name": "ppo2"}, "algorithm.name"),
    ],
)
def test_a_key_without_an_effect_is_refused(algorithm, told):
    assert told in refusal(algorithm=algorithm)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"prompts": "p", "group_size": 1}}, "every advantage would be 0; raise it"),
        (
            {"algorithm": {"name": "dpo"}, "schedule": {"updates_per_step": 2}},
            "algorithm.advantages is dpo and schedule.updates_per_step 2",
        ),
        (
            {"algorithm": {"name": "dpo"}, "rollout": {"prompts": "p", "engines": []}},
            "set rollout.group_size=2, reward.function=null",
        ),
        ({"algorithm": {"reference_refresh": 2}}, "algorithm.reference_refresh needs algorithm.reference=true"),
        (
            {"algorithm": {"name": "dpo"}, "trainer": {"moe": {"routing_replay": "R2"}}},
            "algorithm.advantages is dpo and trainer.moe.routing_replay R2",
        ),
        ({"reward": {"function": None}}, "algorithm.name is grpo but reward.function is null"),
        ({"algorithm": {"advantages": "gae"}}, "needs a critic"),
    ],
)
def test_what_the_other_sections_cannot_give_is_refused(sections, told):
    assert told in refusal(**sections)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_own_values_and_each_can_be_overridden(name):
    teacher = {"teacher": "t"} if name == "distillation" else {}
    algorithm = Algorithm(name=name, **teacher)
    for key in PRESETS[name]:
        assert getattr(algorithm, key) == algorithm.default(key) != type(algorithm).model_fields[key].default
    # Trainer ranks get the configuration as it was written out, with every key.
    assert Algorithm.model_validate(algorithm.model_dump()) == algorithm
    assert Algorithm(name="gspo", clip_high=0.1).clip_high == 0.1
    correction = Algorithm(name="decoupled_ppo", correction={"high": 10.0}).correction
    assert (correction.kind, correction.low, correction.high) == ("icepop", 0.0, 10.0)
    assert NEEDS.keys() <= type(algorithm).model_fields.keys()


# Hooks ----------------------------------------------------------------------------------------------------------------

HERE = "tests.unit.preflight.test_algorithm_config"


def own_advantages(groups):
    return [2 * t.reward for g in groups for t in g.trajectories]


def arrays(groups):
    return [np.full(4, t.reward) for g in groups for t in g.trajectories]


def too_few(groups):
    return [0.0]


def not_finite(groups):
    return [float("nan")] * 2


def own_loss(inputs):
    return -(inputs.weight * inputs.logprobs).sum(), {"loss/own": inputs.weight.sum()}


def no_gradient(inputs):
    return inputs.weight.sum(), {}


def alone(inputs):
    return inputs.logprobs.sum()


def live_metric(inputs):
    return inputs.logprobs.sum(), {"loss/own": inputs.logprobs.sum()}


def test_own_advantages_are_taken_as_numbers_or_arrays():
    assert all_advantages(Algorithm(advantages=f"{HERE}.own_advantages"), [group("a", [1.0, 0.5])]) == [2.0, 1.0]
    found = all_advantages(Algorithm(advantages=f"{HERE}.arrays"), [group("a", [1.0, 0.5])])
    assert [each.tolist() for each in found] == [[1.0] * 4, [0.5] * 4]


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
    with pytest.raises(SlimxError, match="nothing"):
        all_advantages(Algorithm(advantages=f"{HERE}.nothing"), [group("a", [1.0, 0.5])])


def broken(inputs):
    return inputs.no_such_field


def test_hooks_are_tried_on_invented_rollouts_before_a_run():
    def settings(**algorithm: str) -> Config:
        return Config.model_validate({**BASE, "algorithm": algorithm})

    try_hooks(settings())
    try_hooks(settings(advantages=f"{HERE}.own_advantages", loss=f"{HERE}.own_loss"))
    with pytest.raises(SlimxError, match=rf"algorithm.loss={HERE}.broken raised AttributeError on invented rollouts"):
        try_hooks(settings(loss=f"{HERE}.broken"))
    with refused("hook.advantages_result", about=f"{HERE}.too_few"):
        try_hooks(settings(advantages=f"{HERE}.too_few"))


def inputs() -> LossInputs:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    return LossInputs(logprobs=lp, weight=torch.ones(2), advantages=torch.ones(2), old_logprobs=lp.detach())


def test_an_own_loss_is_the_whole_loss():
    loss, metrics = make_loss(Algorithm(loss=f"{HERE}.own_loss"))(inputs())
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
