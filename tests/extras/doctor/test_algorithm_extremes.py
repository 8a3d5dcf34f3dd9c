"""Steps at their edges, under every algorithm, from rewards to the gradient: log-probs far apart, rollouts and groups
without a trained token, rewards without a difference, groups of one, groups that are empty. Gradients stay finite, and
are 0 where nothing is to be learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slimx.config.sections.objectives import PRESETS
from slimx.extras.doctor.effects.probe import Probe, make_probe, policy_gradient, value_gradient
from tests.extras.doctor.effects_stand import config

FAR = -1000.0
MEASURED = ("begin", "now", "reference", "teacher", "entropy", "values", "values_now")


def the_policy_is_far(probe: Probe) -> None:
    for values in probe.now[::2]:
        values[3] = FAR


def reference_and_teacher_are_far(probe: Probe) -> None:
    for reference, teacher in zip(probe.reference, probe.teacher, strict=True):
        reference[3] = teacher[4] = FAR


def the_engine_is_far(probe: Probe) -> None:
    for group in probe.groups:
        for trajectory in group.trajectories:
            trajectory.logprobs[4] = FAR


def some_train_nothing(probe: Probe) -> None:
    for trajectory in [*probe.groups[0].trajectories, *probe.groups[1].trajectories, probe.groups[2].trajectories[0]]:
        trajectory.loss_mask[:] = 0


def rewards_are_equal(probe: Probe) -> None:
    for group in probe.groups:
        group.baseline = 0.75
        for trajectory in group.trajectories:
            trajectory.reward, trajectory.reward_parts = 0.75, {"first": 0.5, "second": 0.25}
            for turn in trajectory.turns:
                turn.reward = 0.375


def rewards_are_huge(probe: Probe) -> None:
    for group in probe.groups:
        for number, trajectory in enumerate(group.trajectories):
            trajectory.reward = 1e6 * number
            trajectory.reward_parts = {"first": 1e6 * number, "second": -1e-6}


def groups_have_one(probe: Probe) -> None:
    kept, at = [], 0
    for group in probe.groups:
        kept.append(at)
        at += len(group.trajectories)
        del group.trajectories[1:]
    for name in MEASURED:
        values = getattr(probe, name)
        values[:] = [values[number] for number in kept]


def one_group_is_empty(probe: Probe) -> None:
    for name in MEASURED:
        del getattr(probe, name)[: len(probe.groups[0].trajectories)]
    probe.groups[0].trajectories.clear()


EDGES: tuple[Callable[[Probe], None], ...] = (
    the_policy_is_far,
    reference_and_teacher_are_far,
    the_engine_is_far,
    some_train_nothing,
    rewards_are_equal,
    rewards_are_huge,
    groups_have_one,
    one_group_is_empty,
)
ALL_TERMS = {"reference": True, "kl_coef": 0.1, "kl_unbiased": True, "entropy_coef": 0.1, "teacher": "t"}
ALL_TERMS |= {"teacher_coef": 0.2, "old_logprobs": "recompute", "opsm_delta": 1e-4}
ALL_TERMS |= {
    "correction": {"kind": "truncate", "level": "sequence"},
    "rejection": {"level": "geometric", "veto": 1e-4},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{
        name: {"name": name} | ({"teacher": "t"} if name == "distillation" else {})
        for name in PRESETS
        if name != "bradley_terry"
    },
    "all terms": ALL_TERMS,
    "a penalty in the rewards": {
        "name": "ppo",
        "reference": True,
        "kl_reward_coef": 0.1,
        "kl_reward_estimator": "k3",
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_at_its_edges_has_a_finite_gradient(name):
    algorithm = ALGORITHMS[name]
    settings = config(algorithm, updates_per_step=1 if name == "dpo" else 2)
    for edge in EDGES:
        probe = make_probe(settings)
        edge(probe)
        gradient = policy_gradient(settings, probe)
        assert np.isfinite(gradient).all(), edge.__name__
        if settings.critic is not None:
            assert np.isfinite(value_gradient(settings, probe)).all(), edge.__name__
        trained = np.concatenate([t.loss_mask[1:] for group in probe.groups for t in group.trajectories]) > 0
        assert not gradient[: len(trained)][~trained].any(), f"{edge.__name__}: an untrained token has a gradient"
        compares = settings.algorithm.group_relative or settings.algorithm.advantages.kind == "remax"
        alone = edge is rewards_are_equal or (edge is groups_have_one and settings.algorithm.group_relative)
        if alone and compares and name not in ("all terms", "kl_cov"):  # which have gradients of their own
            assert np.abs(gradient).max() < 1e-6, f"{edge.__name__}: there is nothing to compare"
        elif edge in (rewards_are_huge, one_group_is_empty, some_train_nothing):
            assert gradient.any(), edge.__name__
