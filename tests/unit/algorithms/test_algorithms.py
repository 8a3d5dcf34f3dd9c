"""Advantages and losses are the published formulas: against numbers worked out by hand, and against naive autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.algorithms.advantages.group import grpo
from slimx.algorithms.inputs import LossInputs
from slimx.algorithms.losses.kl import k3
from slimx.algorithms.losses.objective import make_loss, sft_loss
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Group, Prompt, Span, Trajectory
from tests.unit.algorithms.loss_stand import loss_inputs

# One GRPO batch by hand. Clip to [0.8, 1.3]; eps 0.5, so that a standard deviation of 0.5 divides by exactly 1.
#
# Group A, rewards 1, 0, 0.5: mean 0.5, deviations +0.5, -0.5, 0, unbiased variance (0.25 + 0.25) / 2 = 0.25, std 0.5.
#   advantages +0.5, -0.5, 0.
# Group B, rewards 3, 1: mean 2, deviations +1, -1, unbiased variance (1 + 1) / 1 = 2, std 1.41421356.
#   advantages +1 / 1.91421356 = +0.52240775 and -0.52240775, called +b and -b below.
#
# Rollout  advantage  ratio new/old -> surrogate min(ratio x A, clipped x A)
# A0       +0.5       1.5 -> 0.65 (clipped: 1.3 x 0.5)      0.5 -> 0.25 (0.8 x 0.5 = 0.4 would be more)
# A1       -0.5       0.5 -> -0.4 (clipped: 0.8 x -0.5)     1.5 -> -0.75 (1.3 x -0.5 would be more)     1.0 -> -0.5
# A2        0         2.0 -> 0                              1.0 -> 0
# B0       +b         1.0 -> 0.52240775                     1.25 -> 0.65300969
# B1       -b         1.0 -> -0.52240775                    0.9 -> -0.47016698
B = 1 / (math.sqrt(2) + 0.5)
REWARDS = {"A": [1.0, 0.0, 0.5], "B": [3.0, 1.0]}
RATIOS = {"A": [[1.5, 0.5], [0.5, 1.5, 1.0], [2.0, 1.0]], "B": [[1.0, 1.25], [1.0, 0.9]]}
ADVANTAGES = [0.5, -0.5, 0.0, 0.52240775, -0.52240775]
# Sum of the surrogates: 0.9 - 1.65 + 0 + 0.35 b = -0.56715729, over 11 tokens; A0's first and A1's first are clipped.
TOKEN_LOSS, TOKEN_CLIPPED = 0.56715729 / 11, 2 / 11
# Means per rollout: 0.45, -0.55, 0, 1.125 b, -0.95 b; their sum -0.1 + 0.175 b = -0.00857864, over 5 rollouts.
SAMPLE_LOSS, SAMPLE_CLIPPED = 0.00857864 / 5, (1 / 2 + 1 / 3) / 5
# d loss / d logprob = -weight x ratio x A, and 0 where the clipped term is the smaller one.
GRADIENT = [[0, -0.25], [0, 0.75, 0.5], [0, 0], [-B, -1.25 * B], [B, 0.9 * B]]
ALGORITHM = Algorithm(loss={"low": 0.2, "high": 0.3}, advantages={"eps": 0.5})


def rollout(group: str, index: int, reward: float, sampled: int, **changes: Any) -> Trajectory:
    """Returns one prompt token and `sampled` sampled ones with the old log-prob ln 0.4."""
    length = 1 + sampled
    fields: dict[str, Any] = {
        "id": f"{group}/{index}",
        "rollout_id": f"{group}/{index}",
        "group_id": group,
        "index": index,
        "token_ids": np.arange(10, 10 + length, dtype=np.int32),
        "loss_mask": np.array([0] + [1] * sampled, np.uint8),
        "logprobs": np.array([np.nan] + [math.log(0.4)] * sampled, np.float32),
        "spans": [Span(start=0, stop=1, source="prompt"), Span(start=1, stop=length, source="sampled", version=1)],
        "reward": reward,
    }
    return Trajectory(**{**fields, **changes})


def by_hand() -> list[Group]:
    return [
        Group(
            id=name,
            prompt=Prompt(id=name, token_ids=[10]),
            trajectories=[rollout(name, i, r, len(RATIOS[name][i])) for i, r in enumerate(rewards)],
        )
        for name, rewards in REWARDS.items()
    ]


def test_advantages_of_the_batch_by_hand():
    values = [value for group in by_hand() for value in group_advantages(ALGORITHM, group)]
    assert values == pytest.approx(ADVANTAGES, abs=1e-7)


@pytest.mark.parametrize(
    ("aggregation", "loss", "clipped", "weights"),
    [
        ("token", TOKEN_LOSS, TOKEN_CLIPPED, [1 / 11] * 5),
        ("sample", SAMPLE_LOSS, SAMPLE_CLIPPED, [1 / 10, 1 / 15, 1 / 10, 1 / 10, 1 / 10]),
    ],
)
@pytest.mark.parametrize(("ranks", "limit"), [(1, 100), (2, 3)])
def test_loss_of_the_batch_by_hand_however_it_is_packed(aggregation, loss, clipped, weights, ranks, limit):
    groups = by_hand()
    trajectories = [t for group in groups for t in group.trajectories]
    advantages = [value for group in groups for value in group_advantages(ALGORITHM, group)]
    rows = make_rows(trajectories, advantages, loss_weights(trajectories, aggregation))
    new = [math.log(0.4 * ratio) for group in RATIOS.values() for ratios in group for ratio in ratios]
    at = 0
    for row in rows:  # the label tells which of the 11 tokens it is, wherever it is packed
        row.labels = np.arange(at, at := at + len(row))
    total, metrics, gradient = 0.0, {"loss/policy": 0.0, "loss/clip_fraction": 0.0}, [math.nan] * 11
    for micro in (micro for shard in pack(rows, data_size=ranks, max_tokens=limit).shards for micro in shard):
        token = np.where(micro.weight > 0, micro.labels, 0)
        lp = torch.tensor([new[t] for t in token], dtype=torch.float64, requires_grad=True)
        part, added = make_loss(ALGORITHM)(
            loss_inputs(
                logprobs=lp,
                weight=torch.from_numpy(micro.weight).double(),
                advantages=torch.from_numpy(micro.advantages).double(),
                old_logprobs=torch.from_numpy(micro.rollout_logprobs).double(),
            )
        )
        part.backward()
        total += part.item()
        metrics = {name: value + added[name].item() for name, value in metrics.items()}
        for index, weight, value in zip(token, micro.weight, lp.grad.tolist(), strict=True):
            if weight:
                gradient[index] = value
    assert total == pytest.approx(loss, abs=1e-7)
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-7)
    assert metrics["loss/clip_fraction"] == pytest.approx(clipped, abs=1e-7)
    expected = [weight * value for weight, row in zip(weights, GRADIENT, strict=True) for value in row]
    assert gradient == pytest.approx(expected, abs=1e-7)


# Losses ---------------------------------------------------------------------------------------------------------------


def random_inputs(seed: int, n: int = 64) -> LossInputs:
    """Returns float64 ratios on both sides of the clip, advantages of both signs, a third of the tokens untrained."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    weight = torch.rand(n, generator=g, dtype=torch.float64) * (torch.rand(n, generator=g) > 0.3)
    return loss_inputs(
        logprobs=(old + 0.6 * torch.randn(n, generator=g, dtype=torch.float64)).requires_grad_(),
        weight=weight / weight.sum(),
        advantages=torch.randn(n, generator=g, dtype=torch.float64),
        old_logprobs=old,
        reference_logprobs=old + 0.4 * torch.randn(n, generator=g, dtype=torch.float64),
    )


def naive(inputs: LossInputs, low: float, high: float, kl_coef: float) -> torch.Tensor:
    """Computes the loss token by token, as in the papers."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(inputs.logprobs)):
        new, old, reference = inputs.logprobs[t], inputs.old_logprobs[t], inputs.reference_logprobs[t]
        ratio, advantage = torch.exp(new) / torch.exp(old), inputs.advantages[t]
        clipped = torch.clamp(ratio, 1 - low, 1 + high)
        surrogate = torch.min(ratio * advantage, clipped * advantage)
        kl = torch.exp(reference) / torch.exp(new) - (reference - new) - 1
        total = total + inputs.weight[t] * (kl_coef * kl - surrogate)
    return total


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_naive_formula(seed, kl_coef):
    inputs = random_inputs(seed)
    loss, metrics = make_loss(Algorithm(loss={"high": 0.3}, reference=True, kl_coef=kl_coef))(inputs)
    expected = naive(inputs, 0.2, 0.3, kl_coef)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, inputs.logprobs)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    rises = (inputs.advantages > 0) & (ratio > 1.3)
    falls = (inputs.advantages < 0) & (ratio < 0.8)
    trained = inputs.weight > 0
    assert (rises & trained).any() and (falls & trained).any(), "the example must clip on both sides"
    share = (inputs.weight * (rises | falls)).sum().item()
    assert metrics["loss/clip_fraction"].item() == pytest.approx(share, abs=1e-12)


def test_a_metric_and_a_loss_of_a_batch_are_the_sums_over_its_parts():
    inputs = random_inputs(11)
    loss = make_loss(Algorithm(loss={"high": 0.3}, reference=True, kl_coef=0.1))
    whole, metrics = loss(inputs)
    names = ("logprobs", "weight", "advantages", "old_logprobs", "reference_logprobs")
    parts = [loss(loss_inputs(**{n: getattr(inputs, n)[p] for n in names})) for p in (slice(0, 13), slice(13, 64))]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), abs=1e-12)
    assert metrics.keys() == {"loss/policy", "loss/clip_fraction", "loss/kl", "kl/rollout", "kl/reference"}
    for name, value in metrics.items():
        assert sum(added[name].item() for _, added in parts) == pytest.approx(value.item(), abs=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("huge", [1e4, -1e4, math.inf, -math.inf])
def test_untrained_tokens_with_huge_differences_change_nothing(huge, dtype):
    """Prompt tokens and tools' answers have no log-prob of their own; whatever stands there must not reach the loss."""
    loss = make_loss(Algorithm(loss={"high": 0.3}, reference=True, kl_coef=0.5))
    names = ("weight", "advantages", "old_logprobs", "reference_logprobs")

    def run(keep: slice, old: float, reference: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        values = {
            "weight": [0.0, 0.5, 0.5, 0.0],
            "advantages": [1.0, 1.0, -1.0, -1.0],
            "old_logprobs": [old, -1.0, -1.0, old],
            "reference_logprobs": [reference, -1.5, -0.5, reference],
        }
        lp = torch.tensor([-1.0, -1.1, -1.2, -1.0], dtype=dtype)[keep].requires_grad_()
        total, metrics = loss(
            loss_inputs(logprobs=lp, **{n: torch.tensor(values[n], dtype=dtype)[keep] for n in names})
        )
        total.backward()
        return total, lp.grad, metrics

    total, gradient, metrics = run(slice(0, 4), huge, -huge)
    expected, expected_gradient, expected_metrics = run(slice(1, 3), 0.0, 0.0)
    assert total.item() == expected.item()
    assert gradient.tolist() == [0.0, *expected_gradient.tolist(), 0.0]
    assert {n: v.item() for n, v in metrics.items()} == {n: v.item() for n, v in expected_metrics.items()}


def test_cross_entropy_by_hand():
    """Weights 0.5, 0, 0.25, 0.25; probabilities 0.5, any, 0.25, 1: 0.5 ln 2 + 0.25 ln 4 = ln 2."""
    lp = torch.tensor([0.5, 0.01, 0.25, 1.0], dtype=torch.float64).log().requires_grad_()
    weight = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.float64)
    loss, metrics = sft_loss(loss_inputs(logprobs=lp, weight=weight, advantages=zeros, old_logprobs=zeros))
    loss.backward()
    assert loss.item() == metrics["loss/sft"].item() == pytest.approx(math.log(2), abs=1e-12)
    assert lp.grad.tolist() == [-0.5, 0.0, -0.25, -0.25]
    assert make_loss(Algorithm(name="sft")) is sft_loss


# KL -------------------------------------------------------------------------------------------------------------------

POLICY = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
OTHER = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=torch.float64)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p * (p / q).log()).sum().item()


def test_k3_by_hand():
    """Other / policy 2, 1, 0.5: 2 - ln 2 - 1, 0, 0.5 + ln 2 - 1."""
    policy = torch.tensor([0.25, 0.3, 0.5], dtype=torch.float64).log()
    other = torch.tensor([0.5, 0.3, 0.25], dtype=torch.float64).log()
    assert k3(policy, other).tolist() == pytest.approx([1 - math.log(2), 0, math.log(2) - 0.5], abs=1e-12)


def test_k3_is_the_expected_kl_and_precise_near_zero():
    assert (POLICY * k3(POLICY.log(), OTHER.log())).sum().item() == pytest.approx(kl(POLICY, OTHER), abs=1e-12)
    # d^2 / 2 = 5e-9 for a difference of 1e-4: exp(d) - 1 - d in float32 would lose all its digits.
    near = k3(torch.tensor([-1.0]), torch.tensor([-1.0001])).item()
    assert near == pytest.approx(5e-9, rel=0.02)


def metric_of(name: str, *, sampled_by: torch.Tensor, policy: torch.Tensor, **others: torch.Tensor) -> float:
    """Returns a metric in expectation over all tokens of a small vocabulary, weighted by how often each is sampled."""
    inputs = loss_inputs(logprobs=policy.log(), weight=sampled_by, advantages=torch.ones(4).double(), **others)
    return make_loss(Algorithm())(inputs)[1][name].item()


def test_kl_to_the_reference_is_that_of_the_policy():
    found = metric_of(
        "kl/reference",
        sampled_by=POLICY,
        policy=POLICY,
        old_logprobs=POLICY.log(),
        reference_logprobs=OTHER.log(),
    )
    assert found == pytest.approx(kl(POLICY, OTHER), abs=1e-12)


def test_kl_between_rollout_and_policy_uses_the_rollouts_tokens():
    found = metric_of("kl/rollout", sampled_by=OTHER, policy=POLICY, old_logprobs=OTHER.log())
    assert found == pytest.approx(kl(OTHER, POLICY), abs=1e-12)


def test_kl_between_rollout_and_policy_is_zero_where_they_agree():
    assert metric_of("kl/rollout", sampled_by=POLICY, policy=POLICY, old_logprobs=POLICY.log()) == 0.0


# Advantages -----------------------------------------------------------------------------------------------------------


def test_advantages_without_deviation_are_differences_from_the_mean():
    assert grpo([1.0, 0.0, 0.5], normalize_std=False).tolist() == [0.5, -0.5, 0.0]
    algorithm = Algorithm(advantages={"normalize_std": False})
    assert group_advantages(algorithm, by_hand()[1]) == [1.0, -1.0]


def test_a_group_without_a_baseline_or_without_differences_teaches_nothing():
    assert grpo([3.0]).tolist() == [0.0]
    assert grpo([0.1] * 7).tolist() == pytest.approx([0.0] * 7, abs=1e-9)
    assert grpo([1e8, 1e8 + 1]).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


def test_advantages_do_not_depend_on_other_groups_or_their_sizes():
    first, second = by_hand()
    assert len(first.trajectories) != len(second.trajectories)
    alone = group_advantages(ALGORITHM, second)
    second.trajectories.reverse()
    assert group_advantages(ALGORITHM, second) == alone[::-1]


def test_a_rollout_of_several_trajectories_counts_once():
    """Rollout means 0.5 (of 1 and 0), 1.5, 1: mean 1, std 0.5. Counted per trajectory the mean would be 0.875."""
    trajectories = [
        rollout("g", 0, 1.0, 2, rollout_id="r0", id="r0/a"),
        rollout("g", 1, 1.5, 2, rollout_id="r1"),
        rollout("g", 0, 0.0, 2, rollout_id="r0", id="r0/b"),
        rollout("g", 2, 1.0, 2, rollout_id="r2"),
    ]
    group = Group(id="g", prompt=Prompt(id="p", token_ids=[10]), trajectories=trajectories)
    values = group_advantages(Algorithm(advantages={"eps": 1e-9}), group)
    assert values == pytest.approx([-1.0, 1.0, -1.0, 0.0], abs=1e-6)
    # eps 0.5 is added to the standard deviation: 0.5 / (0.5 + 0.5).
    assert group_advantages(ALGORITHM, group) == pytest.approx([-0.5, 0.5, -0.5, 0.0], abs=1e-7)


def test_supervised_trajectories_need_no_reward():
    group = by_hand()[0]
    for trajectory in group.trajectories:
        trajectory.reward = None
    assert group_advantages(Algorithm(name="sft"), group) == [1.0, 1.0, 1.0]


def test_measurements_change_no_gradient():
    """The ratio is that to the old log-probs, of any model; the KL to the rollout is that to the engine."""
    inputs = random_inputs(3)
    n = len(inputs.weight)
    engine, teacher, entropy = (torch.randn(n, dtype=inputs.weight.dtype) for _ in range(3))
    fields = {name: getattr(inputs, name) for name in ("logprobs", "weight", "advantages", "old_logprobs")}
    loss = make_loss(Algorithm())
    bare, _ = loss(loss_inputs(**fields))
    total, metrics = loss(
        loss_inputs(**fields, rollout_logprobs=engine, teacher_logprobs=teacher, entropy=entropy.requires_grad_())
    )
    assert torch.equal(total, bare) and not any(metric.requires_grad for metric in metrics.values())
    logprobs, weight = inputs.logprobs.detach(), inputs.weight
    gap, other = logprobs - engine, teacher - logprobs
    assert metrics["kl/rollout"].item() == pytest.approx((weight * (gap.exp() - gap - 1)).sum().item(), rel=1e-6)
    assert metrics["kl/teacher"].item() == pytest.approx((weight * (other.exp() - other - 1)).sum().item(), rel=1e-6)
    assert metrics["policy/entropy"].item() == pytest.approx((weight * entropy).sum().item(), rel=1e-6)
