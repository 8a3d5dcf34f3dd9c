"""Section policies: what a further policy inherits, what it may say, and what several were never proven with."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.policies import ACTOR, policy_of
from slimx.extras.lora.form import ServedLora
from slimx.extras.lora.targets import served_modules
from slimx.layout.form import form_of
from tests.refusals import invalid


def config_of(policies: dict[str, Any], **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": "d"},
        "model": {"path": "m"},
        "rollout": {
            "prompts": "p",
            "engines": [{"count": 2, "model": "fp8-copy"}, {"name": "wise", "frozen": True, "model": "w"}],
        },
        "trainer": {"load": "warm", "world_size": 2, "optimizer": {"lr": 1e-3}},
        "algorithm": {"name": "grpo", "loss": {"high": 0.3}},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate({**tree, "policies": policies})


def test_another_policy_inherits_the_runs_settings_except_its_overrides() -> None:
    config = config_of(
        {
            "judge": {"trainer": {"world_size": 1, "optimizer": {"lr": 1e-4}}, "algorithm": {"loss": {"low": 0.1}}},
            "writer": {"model": {"path": "other"}, "algorithm": {"name": "rloo"}, "engines": [{"name": "w1"}]},
            "solver": {"shares": "actor"},
        }
    )
    by_policy = config.by_policy
    assert [*by_policy] == [ACTOR, "judge", "writer"] and by_policy[ACTOR] is config
    assert config.roles == {"actor": "actor", "judge": "judge", "writer": "writer", "solver": "actor"}
    judge, writer = by_policy["judge"], by_policy["writer"]
    assert judge.trainer == config.trainer.model_copy(
        update={"world_size": 1, "optimizer": config.trainer.optimizer.model_copy(update={"lr": 1e-4})}
    )
    assert (judge.algorithm.loss.low, judge.algorithm.loss.high) == (0.1, 0.3)
    # Frozen engines serve the whole run; those of a policy are named after it.
    assert [(group.name, group.count, group.model) for group in judge.rollout.engines] == [("judge", 2, "fp8-copy")]
    # A model of its own begins with its own weights, and another algorithm with its own defaults.
    assert (writer.model.path, writer.trainer.load, writer.algorithm.name) == ("other", None, "rloo")
    assert writer.algorithm == Algorithm(name="rloo")
    assert [group.name for group in writer.rollout.engines] == ["w1"]
    assert not judge.policies and Config.model_validate(config.model_dump(mode="json")) == config


def test_several_groups_of_engines_keep_their_names_behind_the_policys() -> None:
    engines = [{"name": "small"}, {"name": "large", "tensor": 2}]
    judge = config_of({"judge": {}}, rollout={"prompts": "p", "engines": engines}).by_policy["judge"]
    assert [(group.name, group.tensor) for group in judge.rollout.engines] == [("judge-small", 1), ("judge-large", 2)]


@pytest.mark.parametrize(
    ("policies", "code", "about"),
    [
        ({"actor": {}}, "policies.name", "actor"),
        ({"a/b": {}}, "policies.name", "a/b"),
        ({"judge": {"shares": "nobody"}}, "policies.shares", "policies.judge.shares"),
        ({"judge": {"shares": "solver"}, "solver": {"shares": "actor"}}, "policies.shares", "policies.judge.shares"),
        ({"judge": {"shares": "actor", "trainer": {"world_size": 1}}}, "policies.shares", "policies.trainer"),
        ({"judge": {"shares": "actor", "engines_of": "actor"}}, "policies.shares", "policies.engines_of"),
        ({"judge": {"trainer": {"world_sise": 1}}}, "config.unknown_key", "policies.judge.trainer.world_sise"),
        ({"judge": {"algorithm": {"credit": "fair"}}}, "policies.credit", "policies.algorithm.credit"),
        ({"judge": {"trainer": {"world_size": 0}}}, "policies.value", "policies.judge.trainer.world_size"),
        ({"judge": {"engines": [{"name": "actor"}]}}, "policies.engine_name", "actor"),
        ({"judge": {"engines": [{"name": "wise"}]}}, "policies.engine_name", "wise"),
        ({"judge": {"engines": [{"tensor": 2, "nodes": 3}]}}, "engines.nodes", "policies.judge.engines"),
        ({"judge": {"engines": [{"tensor": 2, "expert": 3}]}}, "engines.sizes", "policies.judge.engines"),
        ({"judge": {"engines": [{"name": "j"}, {"name": "j"}]}}, "engines.name_twice", "policies.judge.engines"),
        (
            {"judge": {"trainer": {"world_size": 3, "tensor": 2}}},
            "trainer.world_size",
            "policies.judge.trainer.world_size",
        ),
    ],
)
def test_unknown_or_incompatible_policies_are_refused(policies: dict[str, Any], code: str, about: str) -> None:
    with invalid(code, about=about):
        config_of(policies)


UNPROVEN: dict[str, dict[str, dict[str, Any]]] = {
    "run.fork": {"run": {"dir": "d", "fork": "other"}},
    "numerics.mode": {"numerics": {"mode": "exact"}},
    "trainer.lora": {"trainer": {"lora": {"rank": 4, "alpha": 8}, "load": None}},
    "rollout.engines.urls": {"rollout": {"engines": [{"urls": ["http://127.0.0.1:1"]}]}},
    "algorithm.advantages": {"algorithm": {"name": "reinforce_pp", "loss": {"high": 0.2}}},
    "algorithm.reference_refresh": {"algorithm": {"reference": True, "reference_refresh": 2}},
    "algorithm.teacher": {"algorithm": {"teacher": "wise"}},
    "critic": {"critic": {}, "algorithm": {"name": "ppo", "loss": {"high": 0.2}}},
    "schedule.max_staleness": {"schedule": {"max_staleness": 1}},
    "schedule.colocate": {"schedule": {"colocate": True}},
    "publish.transport": {"publish": {"transport": "disk"}},
    "publish.quantize": {"publish": {"quantize": "ieee"}},
}


@pytest.mark.parametrize("key", UNPROVEN)
def test_features_unproven_with_several_policies_are_refused_by_name(key: str) -> None:
    config_of({"solver": {"shares": "actor"}}, **UNPROVEN[key])  # a role more, and one policy all the same
    with invalid("unproven", about=key):
        config_of({"judge": {}}, **UNPROVEN[key])


@pytest.mark.parametrize(
    ("judge", "about"),
    [
        ({"trainer": {"lora": {"rank": 4, "alpha": 8}, "load": None}}, "policies.judge.trainer.lora"),
        ({"engines": [{"name": "j", "urls": ["http://127.0.0.1:1"]}]}, "policies.judge.engines.urls"),
        ({"algorithm": {"teacher": "wise"}}, "policies.judge.algorithm.teacher"),
    ],
)
def test_it_is_refused_where_a_further_policy_says_it_too(judge: dict[str, Any], about: str) -> None:
    with invalid("unproven", about=about):
        config_of({"judge": judge})


LORA = {"rank": 4, "alpha": 8, "targets": ["attention"]}


def sharing(judge: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Returns a run whose engines generate for a judge, too."""
    defaults: dict[str, dict[str, Any]] = {
        "trainer": {"load": None, "lora": LORA},
        "publish": {"adapters": "alone", "transport": "memory"},
        "rollout": {"prompts": "p", "engines": [{}]},
    }
    return config_of({"judge": {"engines_of": "actor", **judge}}, **{**defaults, **sections})


def test_a_policy_whose_adapters_anothers_engines_have_starts_none() -> None:
    config = sharing({"trainer": {"lora": {"alpha": 4}}})
    judge = config.by_policy["judge"]
    (theirs,), (ours,) = judge.served.policy, config.served.policy
    assert theirs.name == ours.name and theirs.borrowed and not ours.borrowed
    assert (theirs.started, ours.started) == (0, 1)
    assert form_of(config).served() == ServedLora({"actor": 8.0, "judge": 4.0}, 4, served_modules(("attention",)))


@pytest.mark.parametrize(
    ("judge", "sections", "about"),
    [
        ({"engines_of": "wise"}, {}, "policies.judge.engines_of"),
        ({"engines": [{"name": "j"}]}, {}, "policies.engines"),
        ({"model": {"path": "other"}}, {}, "policies.judge.model"),
        ({"trainer": {"load": "warm"}}, {}, "policies.judge.trainer.load"),
        ({"trainer": {"lora": {"rank": 8}}}, {}, "policies.judge.trainer.lora.rank"),
        ({"trainer": {"lora": {"targets": ["mlp"]}}}, {}, "policies.judge.trainer.lora.targets"),
        ({}, {"publish": {"transport": "memory"}}, "publish.adapters"),
        ({}, {"trainer": {"load": None}, "publish": {}}, "trainer.lora"),
    ],
)
def test_policies_that_cannot_share_an_engine_are_refused(
    judge: dict[str, Any], sections: dict[str, Any], about: str
) -> None:
    with invalid("policies.engines_of", about=about):
        sharing(judge, **sections)


def test_a_shared_base_excludes_policies_with_separate_engines() -> None:
    config = sharing({}).model_dump(exclude_unset=True)
    config["policies"]["writer"] = {}
    with invalid("unproven", about="trainer.lora"):
        Config.model_validate(config)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("policy/solver/reward/mean", ("solver", "reward/mean")),
        ("policy/a-b/policy/entropy", ("a-b", "policy/entropy")),
        ("policy/entropy", ("", "policy/entropy")),
        ("reward/mean", ("", "reward/mean")),
    ],
)
def test_the_policy_of_a_metric_is_its_prefix(metric, expected):
    assert policy_of(metric) == expected
