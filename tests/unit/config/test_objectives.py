"""Losses and estimators with parameters of their own, as files and overrides name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimx.config.load import load_config
from tests.refusals import refused

FILE = Path(__file__).parents[3] / "configs" / "moe" / "quickstart.yaml"
SAPO = "{kind: sapo, tau_positive: 2}"


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["algorithm.loss=sapo", "algorithm.loss.tau_positive=2"], "loss", {"kind": "sapo", "tau_positive": 2}),
        (["algorithm.loss.tau_positive=2", "algorithm.loss=sapo"], "loss", {"kind": "sapo", "tau_positive": 2}),
        (["algorithm.loss=sapo", "algorithm.loss={tau_positive: 2, tau_negative: 3}"], "loss", {"tau_negative": 3}),
        ([f"algorithm.loss={SAPO}", "algorithm.loss.kind=clip"], "loss", {"kind": "clip", "high": 0.2}),
        (["algorithm.name=dapo", "algorithm.loss.low=0.1"], "loss", {"kind": "clip", "low": 0.1, "high": 0.28}),
        (["algorithm.loss.high=0.3", "algorithm.loss=null"], "loss", {"kind": "clip", "high": 0.2}),
        (
            ["algorithm.advantages=gdpo", "algorithm.advantages.weights.a=2"],
            "advantages",
            {"kind": "gdpo", "weights": {"a": 2}},
        ),
    ],
)
def test_parameters_are_added_to_those_of_the_same_kind(
    overrides: list[str], key: str, expected: dict[str, Any]
) -> None:
    found = dict(getattr(load_config(FILE, overrides).algorithm, key))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("run", "policy", "expected"),
    [
        (["algorithm.name=dapo"], SAPO, {"kind": "sapo", "tau_positive": 2}),
        ([f"algorithm.loss={SAPO}"], "{kind: clip, high: 0.3}", {"kind": "clip", "high": 0.3}),
        ([f"algorithm.loss={SAPO}"], "{tau_negative: 3}", {"kind": "sapo", "tau_positive": 2, "tau_negative": 3}),
    ],
)
def test_a_policy_has_another_kind_or_other_parameters_than_the_run(
    run: list[str], policy: str, expected: dict[str, Any]
) -> None:
    config = load_config(FILE, [*run, f"policies={{judge: {{algorithm: {{loss: {policy}}}}}}}"])
    found = dict(config.by_policy["judge"].algorithm.loss)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("override", "code", "about"),
    [
        ("algorithm.loss.tau_positive=2", "algorithm.unused", "algorithm.loss.tau_positive"),
        ("algorithm.loss.kind=[a]", "algorithm.unknown", "algorithm.loss"),
        ("algorithm.loss=sappo", "algorithm.unknown", "algorithm.loss"),
        ("algorithm.clip_high=0.3", "config.unknown_key", "algorithm.clip_high"),
        ("policies={x: {algorithm: {gae_lambda: 0.9}}}", "config.unknown_key", "policies.x.algorithm.gae_lambda"),
    ],
)
def test_a_parameter_that_a_kind_does_not_have_is_refused(override: str, code: str, about: str) -> None:
    with refused(code, about=about):
        load_config(FILE, [override])
