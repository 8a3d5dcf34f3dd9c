"""Evaluation engines: what they cannot be combined with, and when they are started."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.extras.generation.checks import without_trainers
from tests.refusals import invalid
from tests.unit.rollout.rollout_stand import config_of

KEYS = {"eval__prompts": "held_out.jsonl", "eval__engines": [{"max_total_tokens": 64}]}
UNPROVEN, ROLE, NAME = "eval.engines_unproven", "eval.engines_role", "eval.engines_name"
MISSING = object()
REWARD_MODEL = {
    "algorithm__name": "bradley_terry",
    "rollout__group_size": 2,
    "rollout__engines": [],
    "reward__function": None,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompts": ({"eval__prompts": MISSING}, "eval.engines_idle"),
    "a reward model": (REWARD_MODEL, "eval.engines_scores"),
    "prefill": ({"eval__engines": [{"role": "prefill"}]}, ROLE),
    "decode": ({"eval__engines": [{"role": "decode"}]}, ROLE),
    "frozen": ({"eval__engines": [{"frozen": True, "model": "m"}]}, ROLE),
    "urls": ({"eval__engines": [{"urls": ["http://127.0.0.1:30000"]}]}, ROLE),
    "the name of the policy's": ({"eval__engines": [{"name": "actor"}]}, NAME),
    "one name twice": ({"eval__engines": [{}, {}]}, NAME),
    "further weights": ({"policies__judge": {}}, UNPROVEN),
    "adapters alone": ({"publish__adapters": "alone", "trainer__lora": {"rank": 1, "alpha": 1}}, UNPROVEN),
}


@pytest.mark.parametrize(("keys", "code"), REFUSED.values(), ids=REFUSED)
def test_what_engines_cannot_evaluate_with_is_refused(keys, code):
    """Each with its code, and about the engines."""
    with invalid(code, about="eval.engines"):
        config_of(**{key: value for key, value in (KEYS | keys).items() if value is not MISSING})


@pytest.mark.parametrize(
    "keys",
    [
        {"policies__solver": {"shares": "actor"}},
        {"trainer__vision": {}},
        {"schedule__colocate": True},
        {"schedule__max_staleness": 2},
        {"publish__transport": "disk", "publish__delta": {"every_full": 5}},
        {"publish__transport": "nixl", "publish__delta": {"every_full": 5}},
        {"trainer__lora": {"rank": 1, "alpha": 1}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_engines_evaluate_together_with_what_has_run(keys):
    assert isinstance(config_of(**KEYS | keys), Config)


OF_GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "keys": ({}, {"api_key_env": "KEY"}, "engines.keys_without_urls", ""),
    "a field": ({}, {"sglang": {"kv_cache_dtype": 1}}, "engines.sglang_value", ".sglang.kv_cache_dtype"),
    "sizes": ({}, {"tensor": 2, "expert": 3}, "engines.sizes", ""),
    "stages": ({}, {"pipeline": 2}, "engines.sizes", ""),
    "exact": ({"numerics__mode": "exact"}, {"tensor": 2, "dp_attention": 2}, "exact.engines", ".dp_attention"),
    "adapters": (
        {"trainer__lora": {"rank": 1, "alpha": 1}},
        {"sglang": {"enable_lora": True}},
        "lora.served",
        ".sglang.enable_lora",
    ),
    "images": ({"trainer__vision": {}}, {"sglang": {"language_only": True}}, "vision.engines", ".sglang.language_only"),
    "codes": ({"publish__quantize": "int4"}, {"model": "m"}, "publish.int4", ".sglang.moe_runner_backend"),
    "drafts": (
        {"publish__quantize": "int4"},
        {"sglang": {"speculative_algorithm": "EAGLE"}},
        "unproven",
        ".sglang.speculative_algorithm",
    ),
}
"""Other keys, keys of a group, and the code and the group's key of the refusal."""


@pytest.mark.parametrize("section", ["rollout", "eval"])
@pytest.mark.parametrize(("keys", "group", "code", "key"), OF_GROUPS.values(), ids=OF_GROUPS)
def test_refusals_name_the_list_of_the_group(section, keys, group, code, key):
    plain = {"rollout__engines": [{"max_total_tokens": 64, "sglang": {"moe_runner_backend": "triton"}}]}
    with invalid(code, about=f"{section}.engines{key}") as caught:
        config_of(**(KEYS | plain | keys | {f"{section}__engines": [group]}))
    problems = [problem for item in caught.value.errors() for problem in item["ctx"]["error"].problems]
    (text,) = {str(problem) for problem in problems if problem.about == f"{section}.engines{key}"}
    other = {"rollout": "eval", "eval": "rollout"}[section]
    assert f"{section}.engines" in text and f"{other}.engines" not in text


def test_engines_during_training_are_started_only_if_the_run_evaluates():
    config = config_of(**KEYS)
    assert [group.name for group in config.served.evaluation] == ["eval"]
    assert config.served.sampling == config.rollout.engines
    assert config.served.groups == (*config.rollout.engines, *config.eval.engines)
    assert without_trainers(config, None).served.evaluation == (), "slimx eval needs no engines during training"
    for off in ({"eval__every": 0}, {"eval__prompts": None}):
        assert config_of(**KEYS | off).served.evaluation == ()
