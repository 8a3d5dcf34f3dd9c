"""A user's own advantages and loss are called with an invented batch before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimx.config.rule import broken, refuse, rules_in
from slimx.config.schema import Config
from slimx.extras.doctor import rules
from slimx.extras.doctor.effects.probe import try_hooks
from tests.refusals import refused

BASE: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}
HERE = "tests.extras.doctor.test_algorithm_hooks"


def user_advantages(groups):
    return [2 * t.reward for g in groups for t in g.trajectories]


def too_few(groups):
    return [0.0]


def user_loss(inputs):
    return -(inputs.weight * inputs.logprobs).sum(), {"loss/own": inputs.weight.sum()}


def faulty(inputs):
    return inputs.no_such_field


def settings(**algorithm: str) -> Config:
    return Config.model_validate({**BASE, "algorithm": algorithm})


def test_hooks_are_tried_on_invented_rollouts_before_a_run():
    try_hooks(settings())
    try_hooks(settings(advantages=f"{HERE}.user_advantages", loss=f"{HERE}.user_loss"))
    with refused("algorithm.hook", about=f"algorithm.loss={HERE}.faulty") as caught:
        try_hooks(settings(loss=f"{HERE}.faulty"))
    assert isinstance(caught.value.__cause__, AttributeError)
    facts = {**settings(loss=f"{HERE}.faulty").facts, "weights": Path()}
    with refused("algorithm.hook", about=f"algorithm.loss={HERE}.faulty") as caught:
        refuse(broken([rules.hooks_answer], facts))
    assert isinstance(caught.value.__cause__, AttributeError)
    with refused("hook.advantages_result", about=f"{HERE}.too_few"):
        try_hooks(settings(advantages=f"{HERE}.too_few"))


@pytest.mark.parametrize(
    ("algorithm", "codes"),
    [
        ({}, []),
        ({"loss": f"{HERE}.user_loss"}, []),
        ({"loss": f"{HERE}.faulty"}, ["algorithm.hook"]),
        ({"advantages": f"{HERE}.too_few"}, ["hook.advantages_result"]),
    ],
)
def test_the_rule_tries_them_once_the_directory_of_weights_is_known(algorithm, codes):
    sections = settings(**algorithm).facts
    assert broken(rules_in(rules), sections) == []
    found = broken(rules_in(rules), sections | {"weights": Path("m")}, before=sections)
    assert [problem.code for problem in found] == codes
