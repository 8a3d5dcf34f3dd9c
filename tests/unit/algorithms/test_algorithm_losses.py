"""Each objective against its paper's formula, written as loops over sequences and differentiated by autograd, and
against numbers worked out by hand; none of them depends on order, packing or the number of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slimx.algorithms.losses.kl import ESTIMATORS
from slimx.algorithms.losses.objective import make_loss, policy_loss
from slimx.config.sections.algorithm import Algorithm
from tests.unit.algorithms.loss_stand import (
    Formula,
    Number,
    Token,
    agree,
    batch,
    clip,
    gap_of,
    loss_inputs,
    minimum,
    packed,
    ratio,
    three_tokens,
)

# The formulas, token by token -----------------------------------------------------------------------------------------


def gspo(tokens: list[Token]) -> list[Number]:
    product = torch.ones((), dtype=torch.float64)
    for t in tokens:
        product = product * ratio(t)
    return [minimum(product ** (1 / len(tokens)), t.a, 0.1, 0.15) for t in tokens]


def topr(tokens: list[Token]) -> list[Number]:
    product = 1.0
    for t in tokens:
        product *= ratio(t).item()
    return [(1.0 if t.a >= 0 else min(max(product, 0.0), 1.0)) * t.a * t.lp for t in tokens]


def sapo(tokens: list[Token]) -> list[Number]:
    out = []
    for t in tokens:
        tau = 1.0 if t.a > 0 else 1.05
        out.append(4 / tau / (1 + torch.exp(-tau * (ratio(t) - 1))) * t.a)
    return out


def dual(t: Token) -> Number:
    value = minimum(ratio(t), t.a, 0.2, 0.2)
    return value if t.a >= 0 else torch.max(value, 1.3 * t.a)


OBJECTIVES: dict[str, tuple[dict[str, Any], Formula]] = {
    "clip": ({"loss": {"high": 0.28}}, clip),
    "dual clip": ({"loss": {"dual": 1.3}}, lambda s: [dual(t) for t in s]),
    "gspo": ({"loss": {"kind": "gspo", "low": 0.1, "high": 0.15}}, gspo),
    "cispo": (
        {"loss": {"kind": "cispo", "low": 0.5, "high": 0.4}},
        lambda s: [min(max(ratio(t).item(), 0.5), 1.4) * t.a * t.lp for t in s],
    ),
    "topr": ({"loss": "topr"}, topr),
    "sapo": ({"loss": "sapo"}, sapo),
    "clip_cov": (
        {"loss": "clip_cov"},
        lambda s: [0 * t.lp if t.selected else minimum(ratio(t), t.a, 0.2, 0.2) for t in s],
    ),
    "kl_cov": (
        {"loss": {"kind": "kl_cov", "coef": 0.7}},
        lambda s: [ratio(t) * t.a - 0.7 * t.selected * torch.abs(t.lp - t.old) for t in s],
    ),
    "plain": ({"loss": "plain"}, lambda s: [t.a * t.lp for t in s]),
}


def surrogate_loss(formula: Formula) -> Callable[[list[list[Token]]], Number]:
    return lambda batch: -sum(t.w * x for s in batch for t, x in zip(s, formula(s), strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_objective_and_gradient_are_those_of_the_papers_formula(name, seed):
    keys, formula = OBJECTIVES[name]
    # GSPO's own form is for one advantage and one weight per sequence.
    sequences = batch(seed, shared_advantages=name in ("gspo", "topr"))
    if name == "gspo":
        sequences.values["weight"] = [(w > 0) * w.max() for w in sequences.values["weight"]]
    agree(Algorithm(**keys), sequences, surrogate_loss(formula))


# Terms added to the objective -----------------------------------------------------------------------------------------

KL: dict[str, Callable[[Number, Number], Number]] = {
    "k1": lambda p, q: torch.log(p / q),
    "k2": lambda p, q: torch.log(p / q) ** 2 / 2,
    "k3": lambda p, q: q / p - 1 - torch.log(q / p),
    "low_variance": lambda p, q: torch.clamp(
        torch.exp(torch.clamp(torch.log(q / p), -20, 20)) - 1 - torch.clamp(torch.log(q / p), -20, 20), -10, 10
    ),
}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", KL)
def test_kl_in_the_loss(estimator, unbiased):
    if estimator == "k1" and not unbiased:
        return
    keys = {
        "loss": {"high": 0.28},
        "reference": True,
        "kl_coef": 0.3,
        "kl_estimator": estimator,
        "kl_unbiased": unbiased,
    }

    def formula(batch: list[list[Token]]) -> Number:
        total = surrogate_loss(clip)(batch)
        for t in (t for s in batch for t in s):
            estimate = KL[estimator](torch.exp(t.lp), torch.exp(t.reference))
            total = total + 0.3 * t.w * estimate * (ratio(t) if unbiased else 1)
        return total

    agree(Algorithm(**keys), batch(4), formula)


def test_extreme_reference_log_probs_stay_finite():
    policy, reference = torch.tensor([-0.1, -100.0]), torch.tensor([-100.0, -0.1])
    assert ESTIMATORS["low_variance"](policy, reference).tolist() == [10.0, 10.0]
    assert ESTIMATORS["k3"](policy, reference).tolist() == pytest.approx([98.9, math.exp(20) - 21])


POLICY = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
OTHER = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("sampled_by", [POLICY, torch.full((4,), 0.25, dtype=torch.float64)])
def test_the_unbiased_kl_has_the_gradient_of_the_kl_for_every_sampler(estimator, sampled_by):
    """Over a whole vocabulary, with logits as parameters: d KL / d logits, in expectation under the sampler."""
    logits = POLICY.log().requires_grad_()
    lp = logits.log_softmax(0)
    algorithm = {"reference": True, "kl_coef": 1.0, "kl_estimator": estimator, "kl_unbiased": True}
    loss, _ = make_loss(Algorithm(**algorithm))(
        loss_inputs(
            logprobs=lp,
            weight=sampled_by,
            advantages=torch.zeros(4, dtype=torch.float64),
            old_logprobs=sampled_by.log(),
            reference_logprobs=OTHER.log(),
        )
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((lp.exp() * (lp - OTHER.log())).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-12)


def test_entropy_in_the_loss():
    agree(
        Algorithm(loss={"high": 0.28}, entropy_coef=0.2),
        batch(5),
        lambda b: surrogate_loss(clip)(b) - 0.2 * sum(t.w * t.entropy for s in b for t in s),
    )


def test_a_teacher_in_the_advantages():
    """Each token's advantage is the reverse KL of this one sample, added to the group's."""

    def formula(b: list[list[Token]]) -> Number:
        for t in (t for s in b for t in s):
            t.a = t.a + 0.5 * (t.teacher - t.rollout)
        return surrogate_loss(clip)(b)

    agree(Algorithm(loss={"high": 0.28}, teacher="t", teacher_coef=0.5), batch(6), formula)
    alone = Algorithm(name="distillation", teacher="t")
    sequences = batch(6)
    sequences.values["advantages"] = [0 * a for a in sequences.values["advantages"]]

    def distilled(b: list[list[Token]]) -> Number:
        return -sum(t.w * minimum(ratio(t), t.teacher - t.rollout, 0.2, 0.2) for s in b for t in s)

    agree(alone, sequences, distilled)


# Corrections ----------------------------------------------------------------------------------------------------------


RULES = {
    "truncate": lambda w, low, high: min(max(w, low), high),
    "icepop": lambda w, low, high: w if low <= w <= high else 0.0,
}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", RULES)
def test_corrections_weigh_the_objective(kind, level):
    low, high = (0.93, 1.07) if level == "geometric" else (0.8, 1.2)
    keys = {"kind": kind, "level": level, "low": low, "high": high}
    sequences, seen = batch(7), []

    def formula(b: list[list[Token]]) -> Number:
        total = torch.zeros((), dtype=torch.float64)
        for s in b:
            factors = [RULES[kind](w, low, high) for w in gap_of(s, level)]
            seen.extend(gap_of(s, level))
            total = total - sum(f * t.w * x for f, t, x in zip(factors, s, clip(s), strict=True))
        return total

    agree(Algorithm(loss={"high": 0.28}, old_logprobs="recompute", correction=keys), sequences, formula)
    assert min(seen) < low and max(seen) > high and any(low < w < high for w in seen), "all three sides must occur"


def test_truncation_by_hand_and_its_metrics():
    """w = 0.25, 1, 4 with bounds 0.5 and 2: weights 0.5, 1, 2. Ratios 1: -(0.5 x 1 + 0.25 x 1 + 0.25 x 2) and so on."""
    keys = {"kind": "truncate", "low": 0.5, "high": 2.0}
    loss, metrics = make_loss(Algorithm(old_logprobs="recompute", correction=keys))(three_tokens())
    assert loss.item() == pytest.approx(-(0.5 * 0.5 * 1 - 0.25 * 1 + 0.25 * 2 * 2), abs=1e-12)
    assert metrics["correction/weight"].item() == pytest.approx(0.5 * 0.5 + 0.25 + 0.25 * 2, abs=1e-12)
    assert metrics["correction/outside"].item() == pytest.approx(0.75, abs=1e-12)


def test_decoupled_ppo_is_clipped_at_the_proximal_policy_times_its_weight():
    """AReaL's formula: (proximal / behaviour) min(u A, clip(u) A) with u = policy / proximal; none above 5."""

    def formula(b: list[list[Token]]) -> Number:
        total = torch.zeros((), dtype=torch.float64)
        for t in (t for s in b for t in s):
            weight = math.exp((t.old - t.rollout).item())
            total = total - t.w * (weight <= 5) * weight * minimum(ratio(t), t.a, 0.2, 0.2)
        return total

    agree(Algorithm(name="decoupled_ppo"), batch(8), formula)


# By hand --------------------------------------------------------------------------------------------------------------


def two_tokens(keys: dict[str, Any], ratios: list[float], advantages: list[float], **fields: Any) -> tuple[float, list]:
    """Returns loss and gradient of two tokens with weight 1/2 each and log-prob ln(0.4 x ratio) against ln 0.4."""
    old = torch.full((2,), math.log(0.4), dtype=torch.float64)
    lp = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    loss, _ = make_loss(Algorithm(**keys))(
        loss_inputs(
            logprobs=lp,
            weight=torch.full((2,), 0.5, dtype=torch.float64),
            advantages=torch.tensor(advantages, dtype=torch.float64),
            old_logprobs=old,
            **fields,
        )
    )
    loss.backward()
    return loss.item(), lp.grad.tolist()


@pytest.mark.parametrize(
    ("keys", "ratios", "advantages", "loss", "gradient"),
    [
        # Ratio 6 with advantage -1: -6 without a bound, -3 with one; 0.5 with -1 is clipped to -0.8.
        ({"loss": {"dual": 3.0}}, [6.0, 0.5], [-1.0, -1.0], (3 + 0.8) / 2, [0.0, 0.0]),
        ({}, [6.0, 0.5], [-1.0, -1.0], (6 + 0.8) / 2, [3.0, 0.0]),
        # Geometric mean of 4 and 1: 2, above 1.5. Clipped for a positive advantage, free for a negative one.
        ({"loss": {"kind": "gspo", "high": 0.5}}, [4.0, 1.0], [1.0, 1.0], -1.5, [0.0, 0.0]),
        ({"loss": {"kind": "gspo", "high": 0.5}}, [4.0, 1.0], [-1.0, -1.0], 2.0, [1.0, 1.0]),
        # Weight min(4, 3) = 3 on ln 1.6, 1 on ln 0.4.
        (
            {"loss": {"kind": "cispo", "low": 1.0, "high": 2.0}},
            [4.0, 1.0],
            [1.0, 1.0],
            -(3 * math.log(1.6) + math.log(0.4)) / 2,
            [-1.5, -0.5],
        ),
        # The sequence's ratio 0.5 x 0.5 = 0.25 weighs the negative token only.
        (
            {"loss": "topr"},
            [0.5, 0.5],
            [1.0, -1.0],
            -(math.log(0.2) - 0.25 * math.log(0.2)) / 2,
            [-0.5, 0.125],
        ),
        # At ratio 1 the gate is 2 / tau and its slope 1: the gradient of ratio x A.
        ({"loss": "sapo"}, [1.0, 1.0], [1.0, -1.0], -(2.0 - 2.0 / 1.05) / 2, [-0.5, 0.5]),
    ],
)
def test_objectives_by_hand(keys, ratios, advantages, loss, gradient):
    found, slope = two_tokens(keys, ratios, advantages)
    assert found == pytest.approx(loss, abs=1e-12)
    assert slope == pytest.approx(gradient, abs=1e-12)


def test_selected_tokens_by_hand():
    """Ratio 1.1 and advantage 1: Clip-Cov drops the first token; KL-Cov takes 2 ln 1.1 from it, with slope 2."""
    selected = torch.tensor([1.0, 0.0])
    loss, gradient = two_tokens({"loss": "clip_cov"}, [1.1, 1.1], [1.0, 1.0], selected=selected)
    assert loss == pytest.approx(-0.55) and gradient == pytest.approx([0.0, -0.55])
    loss, gradient = two_tokens({"loss": {"kind": "kl_cov", "coef": 2.0}}, [1.1, 1.1], [1.0, 1.0], selected=selected)
    assert loss == pytest.approx(-1.1 + math.log(1.1)) and gradient == pytest.approx([-0.55 + 1.0, -0.55])


# Invariance -----------------------------------------------------------------------------------------------------------

EVERY = {
    **{name: keys for name, (keys, _) in OBJECTIVES.items()},
    "all terms": {
        "reference": True,
        "kl_coef": 0.3,
        "kl_unbiased": True,
        "entropy_coef": 0.1,
        "teacher": "t",
        "teacher_coef": 0.2,
        "old_logprobs": "recompute",
        "correction": {"kind": "icepop", "level": "sequence", "low": 0.5, "high": 2.0},
        "rejection": {"level": "geometric", "low": 0.9, "high": 1.1, "veto": 0.3},
        "opsm_delta": 0.05,
    },
}


@pytest.mark.parametrize("name", EVERY)
def test_order_packing_and_microbatches_change_nothing(name):
    loss, sequences = make_loss(Algorithm(**EVERY[name])), batch(9)

    def run(parts: list[list[int]]) -> tuple[float, dict[str, float], dict[int, np.ndarray]]:
        total, sums, gradients = 0.0, {}, {}
        for numbers in parts:
            part = sequences.take(numbers)
            lp, _, inputs = packed(part)
            value, metrics = loss(inputs)
            value.backward()
            total += value.item()
            sums = {key: sums.get(key, 0.0) + m.item() for key, m in metrics.items()}
            gradients |= dict(zip(numbers, lp.grad.split(part.lengths), strict=True))
        return total, sums, gradients

    whole, metrics, gradients = run([[0, 1, 2, 3, 4]])
    for parts in ([[4, 2, 0, 1, 3]], [[3, 1], [2], [0, 4]], [[0], [1], [2], [3], [4]]):
        total, sums, found = run(parts)
        assert total == pytest.approx(whole, rel=1e-12)
        assert sums == pytest.approx(metrics, rel=1e-12)
        for number, gradient in gradients.items():
            assert torch.allclose(found[number], gradient, rtol=0, atol=1e-14), number


def test_a_correction_has_no_effect_on_the_engines_log_probs():
    _, _, inputs = packed(batch(1))
    _, metrics = policy_loss(
        replace(inputs, rollout_logprobs=inputs.old_logprobs),
        lambda tokens: (tokens.log_ratio, torch.zeros_like(tokens.trained)),
        Algorithm(old_logprobs="recompute", correction={"kind": "truncate"}),
    )
    assert metrics["correction/weight"].item() == pytest.approx(inputs.weight.sum().item())
