"""A token on which two policies differ beyond what fp32 can hold costs a run no gradient: loss and gradient stay finite
under every algorithm, and ratios within the bound are those of before to the bit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from slimx.algorithms.losses.kl import ESTIMATORS
from slimx.algorithms.losses.objective import make_loss, policy_loss
from slimx.algorithms.losses.surrogates import Surrogate, cispo, clip, kl_cov, sapo
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import LOSSES, PRESETS
from tests.unit.algorithms.loss_stand import loss_inputs

FAR = 1000.0
RECOMPUTED: dict[str, Any] = {"old_logprobs": "recompute"}
KL: dict[str, Any] = {"reference": True, "kl_coef": 0.1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{
        name: {"name": name} | ({"teacher": "t"} if name == "distillation" else {})
        for name in PRESETS
        if name != "bradley_terry"
    },
    **{f"loss {loss}": {"loss": loss} for loss in LOSSES if loss not in ("sft", "bradley_terry")},
    "dual clip": {"loss": {"dual": 3.0}},
    "wide clip": {"loss": {"low": 1.0, "high": 1e9}},
    **{f"kl {name}": {**KL, "kl_estimator": name} for name in ("k2", "k3", "low_variance")},
    **{f"unbiased kl {name}": {**KL, "kl_estimator": name, "kl_unbiased": True} for name in ESTIMATORS},
    **{
        f"{kind} {level}": {**RECOMPUTED, "correction": {"kind": kind, "level": level, "low": 0.1, "high": 1e9}}
        for kind in ("truncate", "icepop")
        for level in ("token", "sequence", "geometric")
    },
    "rejection": {**RECOMPUTED, "rejection": {"level": "sequence", "low": 0.5, "veto": 1e-4}},
    "opsm": {"opsm_delta": 1e-4},
}


def gradient(algorithm: Algorithm, distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns loss and gradient, fp32, of seven trained tokens of three sequences and one untrained token. Advantages
    have both signs; the log-probs of one token of the first sequence and one of the second lie `distance` above those
    compared with, or (negative) under them."""
    shifted = torch.tensor([0, distance, 0, 0, distance, 0, 0, 0])
    other = torch.full((8,), -0.5) - shifted.clamp(min=0)
    logprobs = (torch.full((8,), -0.5) + shifted.clamp(max=0)).requires_grad_()
    sequence = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])

    def sequence_sum(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3).index_add_(0, sequence, values.detach())[sequence]

    loss, metrics = make_loss(algorithm)(
        loss_inputs(
            logprobs=logprobs,
            weight=torch.tensor([1, 1, 1, 1, 1, 1, 1, 0]) / 7,
            advantages=torch.tensor([1.0, 1, 1, -1, -1, -1, 1, 1]),
            old_logprobs=other,
            rollout_logprobs=other - shifted if algorithm.old_logprobs == "recompute" else other,
            reference_logprobs=other if algorithm.reference else None,
            teacher_logprobs=other if algorithm.taught else None,
            entropy=torch.ones(8),
            selected=torch.tensor([0, 1, 0, 0, 0, 1, 0, 0]),
            sequence_sum=sequence_sum,
        )
    )
    (found,) = torch.autograd.grad(loss, logprobs)
    assert all(torch.isfinite(value) for value in metrics.values()), metrics
    return loss.detach(), found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_log_ratio_beyond_fp32_gives_a_finite_loss_and_gradient(name):
    for distance in (FAR, -FAR, 90.0, -90.0):
        loss, found = gradient(Algorithm(**ALGORITHMS[name]), distance)
        assert torch.isfinite(loss) and torch.isfinite(found).all(), distance
        assert found[6] != 0 and found[7] == 0, "the sequence next to them still has a gradient"


def unbounded(tokens: Any) -> torch.Tensor:
    return tokens.log_ratio.exp()


FORMULAS: dict[str, tuple[Surrogate, Any]] = {
    "clip": (
        partial(clip, low=0.2, high=0.3),
        lambda t, r: torch.minimum(r * t.advantages, r.clamp(0.8, 1.3) * t.advantages),
    ),
    "cispo": (partial(cispo, low=1.0, high=4.0), lambda t, r: r.detach().clamp(0.0, 5.0) * t.advantages * t.logprobs),
    "sapo": (
        partial(sapo, tau_positive=1.0, tau_negative=1.0),
        lambda t, r: 4 / 1.0 * torch.sigmoid(1.0 * (r - 1)) * t.advantages,
    ),
    "kl_cov": (
        partial(kl_cov, coef=0.0),
        lambda t, r: r * t.advantages - 0.0 * torch.where(t.columns.selected > 0, t.log_ratio.abs(), 0.0),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_within_the_bound_values_and_gradients_are_unchanged_to_the_bit(name):
    surrogate, formula = FORMULAS[name]
    random = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(4096, generator=random)
    shift = torch.cat([torch.randn(4094, generator=random), torch.tensor([19.9, -19.9])])
    inputs = {"old_logprobs": old, "weight": torch.full((4096,), 1 / 4096)}
    inputs |= {"advantages": torch.randn(4096, generator=random), "selected": torch.zeros(4096)}

    def run(objective: Surrogate) -> tuple[float, torch.Tensor]:
        logprobs = (old + shift).requires_grad_()
        loss, _ = policy_loss(loss_inputs(logprobs=logprobs, **inputs), objective, Algorithm())
        return loss.item(), torch.autograd.grad(loss, logprobs)[0]

    found, expected = (
        run(function) for function in (surrogate, lambda t: (formula(t, unbounded(t)), torch.zeros_like(t.trained)))
    )
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])


def test_beyond_the_bound_a_ratio_is_constant():
    """A = -1 at a ratio that no clip bounds: e^19 at log-ratio 19, and e^20 without a gradient at 21.

    At 20 itself torch has a gradient up to 2.13, and none since."""
    values = []
    for distance in (19.0, 21.0):
        logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
        loss, _ = make_loss(Algorithm())(
            loss_inputs(
                logprobs=logprobs,
                weight=torch.ones(1, dtype=torch.float64),
                advantages=-torch.ones(1, dtype=torch.float64),
                old_logprobs=torch.tensor([-0.5 - distance], dtype=torch.float64),
            )
        )
        values.append((loss.item(), torch.autograd.grad(loss, logprobs)[0].item()))
    assert values[0] == (pytest.approx(math.exp(19)), pytest.approx(math.exp(19)))
    assert values[1] == (pytest.approx(math.exp(20)), 0.0)


@pytest.mark.parametrize("name", ["k3", "low_variance"])
def test_a_kl_within_the_bound_is_unchanged_to_the_bit(name):
    difference = torch.linspace(-19.0, 2.0, 1001)
    policy = torch.full_like(difference, -20.0)
    expected = torch.expm1((policy + difference) - policy) - ((policy + difference) - policy)
    found = ESTIMATORS[name](policy, policy + difference)
    assert torch.equal(found, expected if name == "k3" else expected.clamp(-10, 10))
