"""Truncated weights and rejection together, and off-policy sequence masking: against the published rules written as
loops over sequences, and against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slimx.algorithms.losses.objective import make_loss
from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from tests.unit.algorithms.loss_stand import Number, Token, agree, batch, clip, gap_of, loss_inputs, three_tokens

KEYS: dict[str, Any] = {"loss": {"high": 0.28}, "old_logprobs": "recompute"}


def weighted(factors: Any) -> Any:
    """Returns -(sum of weight x factor x clipped objective), with `factors` of the tokens of each sequence."""

    def formula(sequences: list[list[Token]]) -> Number:
        total = torch.zeros((), dtype=torch.float64)
        for tokens in sequences:
            total = total - sum(f * t.w * x for f, t, x in zip(factors(tokens), tokens, clip(tokens), strict=True))
        return total

    return formula


@pytest.mark.parametrize("veto", [0.0, 0.5])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_truncated_weights_and_rejection_act_together(level, veto):
    """slime's `tis_mode: truncate` with `use_rs` and `rs_veto_threshold`, which is verl's rollout_is with
    rollout_rs: the weight is the token's, the bounds of rejection are of another level."""
    low, high = (0.93, 1.07) if level == "geometric" else (0.8, 1.2)
    kept: list[bool] = []

    def factors(tokens: list[Token]) -> list[float]:
        ratios, whole = gap_of(tokens, "token"), gap_of(tokens, level)
        vetoed = min(ratios) < veto
        inside = [low <= w <= high and not vetoed for w in whole]
        kept.extend(inside)
        return [min(w, 1.1) * counts for w, counts in zip(ratios, inside, strict=True)]

    algorithm = Algorithm(
        **KEYS,
        correction={"kind": "truncate", "high": 1.1},
        rejection={"level": level, "low": low, "high": high, "veto": veto},
    )
    agree(algorithm, batch(7), weighted(factors))
    assert {True, False} == set(kept), "both sides must occur"


def test_a_veto_alone_leaves_a_sequence_out_whole():
    vetoed: list[bool] = []

    def factors(tokens: list[Token]) -> list[float]:
        vetoed.append(min(gap_of(tokens, "token")) < 0.6)
        return [float(not vetoed[-1])] * len(tokens)

    agree(Algorithm(**KEYS, rejection={"veto": 0.6}), batch(7), weighted(factors))
    assert {True, False} == set(vetoed)


def test_truncation_and_rejection_by_hand():
    """One sequence with w = 0.25, 1, 4: weights 0.25, 1, 2, and the first token is rejected. A veto at 0.3 rejects all
    three."""
    inputs = three_tokens()
    keys = {**KEYS, "correction": {"kind": "truncate"}}
    rejection = {"level": "token", "low": 0.5, "high": 5.0}
    loss, metrics = make_loss(Algorithm(**keys, rejection=rejection))(inputs)
    assert loss.item() == pytest.approx(-(-0.25 + 0.25 * 2 * 2), abs=1e-12)
    assert metrics["rejection/share"].item() == pytest.approx(0.5)
    assert metrics["correction/weight"].item() == pytest.approx(0.5 * 0.25 + 0.25 + 0.25 * 2)
    assert metrics["correction/outside"].item() == pytest.approx(0.25)
    loss, metrics = make_loss(Algorithm(**keys, rejection={**rejection, "veto": 0.3}))(inputs)
    assert loss.item() == 0 and metrics["rejection/share"].item() == pytest.approx(1.0)


def test_rejection_leaves_kl_and_entropy_of_a_token_as_they_are():
    """Only the objective of a token is rejected; the policy is held to its reference still."""
    terms = {"reference": True, "kl_coef": 0.3, "entropy_coef": 0.2}

    def formula(sequences: list[list[Token]]) -> Number:
        total = torch.zeros((), dtype=torch.float64)
        for t in (t for tokens in sequences for t in tokens):
            d = t.reference - t.lp
            total = total + t.w * (0.3 * (torch.exp(d) - d - 1) - 0.2 * t.entropy)
        return total

    # Nothing lies within 1e-9 of 1: every token is rejected.
    nothing = {"level": "token", "low": 1 - 1e-9, "high": 1 + 1e-9}
    agree(Algorithm(**KEYS, **terms, rejection=nothing), batch(3), formula)


@pytest.mark.parametrize("delta", [1e-4, 0.05, 0.2])
def test_off_policy_sequences_are_masked_where_the_advantage_is_negative(delta):
    """DeepSeek-V3.2: M = 0 where A < 0 and the mean of log(engine / policy) over the sequence is above
    delta, else 1."""
    masked: list[bool] = []

    def factors(tokens: list[Token]) -> list[float]:
        drift = sum((t.rollout - t.lp).item() for t in tokens) / len(tokens)
        out = [t.a.item() < 0 and drift > delta for t in tokens]
        masked.extend(out)
        return [float(not dropped) for dropped in out]

    for seed in range(3):
        agree(Algorithm(**KEYS, opsm_delta=delta), batch(seed), weighted(factors))
    assert {True, False} == set(masked)


def test_off_policy_sequence_masking_by_hand():
    """Policy / engine 0.5 and 1.25: the mean of log(engine / policy) is (ln 2 - ln 1.25) / 2 = 0.235. The token with
    the positive advantage counts whatever it is."""
    engine = torch.full((2,), math.log(0.4), dtype=torch.float64)
    policy = engine + torch.tensor([0.5, 1.25], dtype=torch.float64).log()
    inputs = loss_inputs(
        logprobs=policy.requires_grad_(),
        weight=torch.full((2,), 0.5, dtype=torch.float64),
        advantages=torch.tensor([-1.0, 1.0], dtype=torch.float64),
        old_logprobs=engine,
    )
    loss, metrics = make_loss(Algorithm(loss="plain", opsm_delta=0.2))(inputs)
    assert loss.item() == pytest.approx(-0.5 * math.log(0.5)) and metrics["opsm/share"].item() == 0.5
    loss, metrics = make_loss(Algorithm(loss="plain", opsm_delta=0.3))(inputs)
    assert loss.item() == pytest.approx(0.5 * math.log(0.2) - 0.5 * math.log(0.5))
    assert metrics["opsm/share"].item() == 0


# Configuration --------------------------------------------------------------------------------------------------------


def refusal(**algorithm: Any) -> str:
    sections = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "algorithm": algorithm}
    with pytest.raises(ValueError) as refused:
        Config.model_validate(sections)
    return str(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"rejection": {"level": "token"}}, "algorithm.rejection"),
        ({"rejection": {"veto": 1e-4}}, "algorithm.rejection"),
        ({"old_logprobs": "recompute", "rejection": {"high": 3.0}}, "algorithm.rejection.level"),
        ({"old_logprobs": "recompute", "rejection": {"level": "token", "low": 1.5}}, "algorithm.rejection"),
        ({"old_logprobs": "recompute", "rejection": {"level": "token", "veto": 1.0}}, "algorithm.rejection.veto"),
        ({"name": "sft", "opsm_delta": 1e-4}, "algorithm.opsm_delta"),
        ({"name": "dpo", "rejection": {"veto": 1e-4}}, "algorithm.rejection"),
        ({"opsm_delta": 0.0}, "algorithm.opsm_delta"),
    ],
)
def test_rejection_without_an_effect_is_refused(algorithm, key):
    assert key in refusal(**algorithm)
