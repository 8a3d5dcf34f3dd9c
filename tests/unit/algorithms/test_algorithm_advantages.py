"""Advantages by hand and against loops over the papers' definitions: unequal groups, rollouts of several trajectories,
groups of one, equal rewards, and any order of all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slimx.algorithms.advantages.estimate import StepData, all_advantages, finish_advantages, group_advantages
from slimx.algorithms.advantages.group import gdpo, remax, rloo
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import ClipCov, KlCov
from slimx.data.batch import TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Prompt, Span, Trajectory, Turn
from slimx.extras.preferences.dpo import assign_preferences
from slimx.extras.token_level.covariance import select_tokens
from tests.refusals import refused
from tests.unit.algorithms.advantage_stand import group, trajectory
from tests.unit.algorithms.loss_stand import loss_inputs


def rows_of(algorithm: Algorithm, groups: list[Group], aggregation: str = "token") -> list[TrainingRow]:
    members = [t for g in groups for t in g.trajectories]
    return make_rows(members, all_advantages(algorithm, groups), loss_weights(members, aggregation))


# Groups ---------------------------------------------------------------------------------------------------------------


def test_leave_one_out_by_hand():
    """Rewards 1, 0, 0.5: others' means 0.25, 0.75, 0.5."""
    assert rloo([1.0, 0.0, 0.5]).tolist() == pytest.approx([0.75, -0.75, 0.0])
    assert rloo([3.0]).tolist() == [0.0]
    assert rloo([0.3] * 5).tolist() == pytest.approx([0.0] * 5, abs=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "gdpo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1e6 / 7])
def test_advantages_of_equal_rewards_are_0_to_the_last_bit(name, reward):
    """A rest of 1e-17, over a deviation of 1e-6, is a gradient for which Adam would take a whole step."""
    equal = group("a", [reward] * 7)
    for member in equal.trajectories:
        member.reward_parts = {"x": reward}
    assert all_advantages(Algorithm(name=name), [equal]) == [0.0] * 7


def test_a_greedy_baseline_by_hand():
    assert remax([1.0, 0.0], 0.25).tolist() == [0.75, -0.25]
    algorithm = Algorithm(name="remax")
    assert group_advantages(algorithm, group("a", [1.0, 0.0], baseline=0.25)) == [0.75, -0.25]
    with refused("advantages.baseline", about="a"):
        group_advantages(algorithm, group("a", [1.0, 0.0]))


def test_each_reward_part_is_normalized_separately():
    """Parts 0, 2 and 0, 0.02 have the same normal form, +-1 / sqrt 2; part "format" has weight 0.5."""
    parts = {"right": [0.0, 2.0], "format": [0.02, 0.0]}
    half = math.sqrt(0.5)
    found = gdpo(parts, {"format": 0.5}, eps=1e-12)
    assert found.tolist() == pytest.approx([-half + 0.5 * half, half - 0.5 * half])


def test_gdpo_is_normalized_over_the_rollouts_of_the_step():
    """Advantages +-2a, +-a and 0 with a = 1 / sqrt 2: their deviation is a sqrt 2. A rollout of two trajectories counts
    once; equal rewards give 0."""
    groups = [group("a", [1.0, 0.0]), group("b", [1.0, 0.0]), group("c", [1.0])]
    parts = [
        {"x": 1.0, "y": 1.0},
        {"x": 0.0, "y": 0.0},
        {"x": 1.0, "y": 5.0},
        {"x": 0.0, "y": 5.0},
        {"x": 1.0, "y": 0.0},
    ]
    for member, values in zip([t for g in groups for t in g.trajectories], parts, strict=True):
        member.reward_parts = values
    deviation = math.sqrt((4 + 4 + 1 + 1 + 0) / 5)
    expected = [2 / deviation, -2 / deviation, 1 / deviation, -1 / deviation, 0.0]
    algorithm = Algorithm(name="gdpo", advantages={"eps": 1e-12})
    assert all_advantages(algorithm, groups) == pytest.approx(expected, abs=1e-5)
    twin = trajectory("a", 0, 1.0, id="a/0b", reward_parts=parts[0])
    groups[0].trajectories.append(twin)
    assert all_advantages(algorithm, groups) == pytest.approx([*expected[:2], expected[0], *expected[2:]], abs=1e-5)
    groups[1].trajectories[0].reward_parts = {"x": 1.0}
    with refused("advantages.reward_part", about="b/0"):
        all_advantages(algorithm, groups)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline", "remax", "gdpo"]
)
def test_order_changes_nothing_and_empty_comparisons_teach_nothing(name):
    """Unequal groups, a fan-out, equal rewards, a group of one; all rows in another order."""
    random = np.random.default_rng(3)
    rewards = {"a": [1.0, 0.0, 0.25], "b": [0.5, 0.5], "c": [2.0], "d": [0.1, 0.2, 0.3, 0.4]}
    groups = [group(key, values, baseline=0.3) for key, values in rewards.items()]
    groups[0].trajectories.append(trajectory("a", 1, 0.5, sampled=5, id="a/1b"))
    groups.append(group("empty", [], baseline=0.1))
    for t in (t for g in groups for t in g.trajectories):
        t.reward_parts = {"all": t.reward}
    algorithm = Algorithm(name=name)

    def run(groups: list[Group]) -> dict[str, list[float]]:
        members = [t for g in groups for t in g.trajectories]
        rows = rows_of(algorithm, groups)
        finish_advantages(algorithm, StepData(groups=groups, updates=[rows], seed=(1, 2)))
        return {t.id: row.advantages[1:].tolist() for t, row in zip(members, rows, strict=True)}

    found = run(groups)
    shuffled = [
        Group(id=g.id, prompt=g.prompt, baseline=g.baseline, trajectories=list(random.permutation(g.trajectories)))
        for g in reversed(groups)
    ]
    for key, values in run(shuffled).items():
        assert values == pytest.approx(found[key], abs=1e-6), key
    if name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "gdpo"):
        for key in ("b/0", "b/1", "c/0"):
            assert found[key] == pytest.approx([0.0] * 3, abs=1e-6)
        assert found["a/1"][0] == found["a/1b"][0]


# Rewards per token ----------------------------------------------------------------------------------------------------


PENALTIES = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
    "low_variance": lambda p, q: min(math.exp(min(q - p, 20)) - 1 - min(q - p, 20), 10),
}
"""Estimators of KL(policy || reference) at one token, from its log-probs."""


def reinforce(rewards: list[float], penalties: list[list[float]], gamma: float, coef: float) -> list[list[float]]:
    """Computes REINFORCE++ by its definition: discounted sums of score at the end minus KL at every token, whitened."""
    sums = []
    for score, kl in zip(rewards, penalties, strict=True):
        sequence = [-coef * x for x in kl]
        sequence[-1] += score
        sums.append(
            [sum(gamma ** (k - t) * sequence[k] for k in range(t, len(sequence))) for t in range(len(sequence))]
        )
    every = [x for s in sums for x in s]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every))
    return [[(x - mean) / deviation for x in s] for s in sums]


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("estimator", PENALTIES)
def test_reinforce_with_kl_in_every_tokens_reward(estimator, name):
    """One token is so unlikely under the policy that `low_variance` is at its bound."""
    random = np.random.default_rng(0)
    groups = [group("a", [1.0, 0.0, 0.5]), group("b", [2.0, 1.5])]
    for t in (t for g in groups for t in g.trajectories):
        t.logprobs[2:] = -random.random(3)
    groups[0].trajectories[1].logprobs[3] = -4.0
    reference = [-random.random(4).astype(np.float32) for _ in range(5)]
    algorithm = Algorithm(
        name=name, reference=True, kl_reward_coef=0.2, kl_reward_estimator=estimator, advantages={"gamma": 0.9}
    )
    rows = rows_of(algorithm, groups)
    step = StepData(groups=groups, updates=[rows[:3], rows[3:]], reference=reference, seed=(0, 0))
    metrics = finish_advantages(algorithm, step)
    rewards = [1.0, 0.0, 0.5, 2.0, 1.5]
    if name == "reinforce_pp_baseline":
        rewards = [0.5, -0.5, 0.0, 0.25, -0.25]
    lp = [row.rollout_logprobs[1:].tolist() for row in rows]
    ref = [x[1:].tolist() for x in reference]
    kl = [[PENALTIES[estimator](p, q) for p, q in zip(one, two, strict=True)] for one, two in zip(lp, ref, strict=True)]
    assert (max(map(max, kl)) == 10) == (estimator == "low_variance")
    for row, expected in zip(rows, reinforce(rewards, kl, 0.9, 0.2), strict=True):
        assert row.advantages[0] == 0 and row.advantages[1:].tolist() == pytest.approx(expected, abs=1e-5)
        assert row.values is None and row.returns is None
    assert metrics["kl/reward"] == pytest.approx(np.mean(sum(kl, [])), rel=1e-5)


# GiGPO ----------------------------------------------------------------------------------------------------------------


def episode(index: int, reward: float, states: list[str], gains: list[float]) -> Trajectory:
    """Makes an episode of two prompt tokens and turns of two sampled tokens and one of a tool."""
    spans, at = [Span(start=0, stop=2, source="prompt")], 2
    for turn in range(len(states)):
        spans.append(Span(start=at, stop=at + 2, source="sampled", turn=turn, version=0))
        spans.append(Span(start=at + 2, stop=at + 3, source="inserted", turn=turn + 1))
        at += 3
    mask = np.zeros(at - 1, np.uint8)
    spans.pop()
    for span in spans:
        mask[span.start : span.stop] = span.source == "sampled"
    turns = [Turn(reward=gain, state_key=key) for key, gain in zip(states, gains, strict=True)]
    return Trajectory(
        id=f"g/{index}",
        rollout_id=f"g/{index}",
        group_id="g",
        index=index,
        token_ids=np.arange(at - 1, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        spans=spans,
        turns=turns,
        reward=reward,
    )


def test_turns_that_began_in_the_same_state_are_compared_by_hand():
    """gamma 0.5, no deviation. Returns: g/0 1 + 0.5 x 3 = 2.5 then 3; g/1 0 + 0.5 x 1 = 0.5 then 1 (the reward 1 that
    no turn accounts for falls on its last turn). State "s": 2.5 and 0.5, mean 1.5. "u" and "v" are alone. Episodes 4
    and 1, mean 2.5. The step's weight is 2."""
    members = [episode(0, 4.0, ["s", "u"], [1.0, 3.0]), episode(1, 1.0, ["s", "v"], [0.0, 0.0])]
    algorithm = Algorithm(name="gigpo", advantages={"gamma": 0.5, "normalize_std": False, "step_coef": 2.0})
    found = all_advantages(algorithm, [Group(id="g", prompt=Prompt(id="g", token_ids=[1]), trajectories=members)])
    for array, whole, step in zip(found, (1.5, -1.5), (1.0, -1.0), strict=True):
        both = whole + 2 * step
        # Positions predict tokens 1 to 6: prompt, two of turn 0, the tool's, two of turn 1.
        assert array.tolist() == pytest.approx([whole, both, both, whole, whole, whole])


def test_turns_are_compared_across_the_group_in_any_order():
    members = [
        episode(0, 1.0, ["s", "t", "s"], [0.0, 0.0, 1.0]),
        episode(1, 0.0, ["t", "s"], [0.0, 0.0]),
        episode(2, 0.5, ["x"], [0.5]),
    ]
    algorithm = Algorithm(name="gigpo", advantages={"gamma": 1.0, "eps": 1e-9})
    whole = [value - 0.5 for value in (1.0, 0.0, 0.5)]
    deviation = np.std([1.0, 0.0, 0.5], ddof=1)
    # State s: returns 1, 1 of g/0 and 0 of g/1; state t: 1 of g/0 and 0 of g/1.
    s = (np.array([1.0, 1.0, 0.0]) - 2 / 3) / np.std([1.0, 1.0, 0.0], ddof=1)
    t = np.array([0.5, -0.5]) / np.std([1.0, 0.0], ddof=1)
    steps = [[s[0], t[0], s[1]], [t[1], s[2]], [0.0]]
    for order in ([0, 1, 2], [2, 0, 1]):
        group_ = Group(id="g", prompt=Prompt(id="g", token_ids=[1]), trajectories=[members[i] for i in order])
        for number, array in zip(order, all_advantages(algorithm, [group_]), strict=True):
            sampled = members[number].loss_mask[1:].astype(bool)
            expected = np.repeat(whole[number] / deviation + np.array(steps[number]), 2)
            assert array[sampled].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(("turns", "code"), [([], "advantages.turns"), ([Turn(), Turn()], "advantages.state_key")])
def test_turns_without_a_state_are_refused_by_name(turns, code):
    members = [episode(0, 1.0, ["s", "t"], [0.0, 0.0]), episode(1, 0.0, ["s", "t"], [0.0, 0.0])]
    members[1].turns = turns
    with refused(code, about="g/1"):
        all_advantages(
            Algorithm(name="gigpo"), [Group(id="g", prompt=Prompt(id="g", token_ids=[1]), trajectories=members)]
        )


# DPO ------------------------------------------------------------------------------------------------------------------


def test_the_policy_gradient_of_preferences_is_the_dpo_gradient():
    """-log sigmoid(beta ((c - c_ref) - (r - r_ref))), averaged over pairs, by autograd; and by hand for one pair."""
    import torch

    from slimx.algorithms.losses.objective import make_loss

    random = np.random.default_rng(1)
    groups = [group("a", [0.0, 1.0]), group("b", [1.0, 0.0]), group("c", [0.3, 2.0, 0.7])]
    groups[1].trajectories[0] = trajectory("b", 0, 1.0, sampled=6)
    algorithm = Algorithm(name="dpo", advantages={"beta": 0.3})
    rows = rows_of(algorithm, groups, "sum")
    policy, reference = ([-2 * random.random(len(row)) for row in rows] for _ in range(2))
    step = StepData(groups=groups, updates=[rows], policy=policy, reference=reference, seed=(0, 0))
    metrics = finish_advantages(algorithm, step)
    leaves = [torch.tensor(x, requires_grad=True) for x in policy]
    loss = torch.zeros((), dtype=torch.float64)
    for row, lp in zip(rows, leaves, strict=True):
        part, _ = make_loss(algorithm)(
            loss_inputs(
                logprobs=lp,
                weight=torch.from_numpy(row.weight).double(),
                advantages=torch.from_numpy(row.advantages).double(),
                old_logprobs=lp.detach(),
            )
        )
        loss = loss + part
    found = torch.autograd.grad(loss, leaves)

    def summed(number: int) -> torch.Tensor:
        trained = torch.from_numpy(rows[number].weight > 0)
        return (leaves[number] - torch.from_numpy(reference[number]))[trained].sum()

    pairs = [(1, 0), (2, 3), (5, 4)]  # of group c: rewards 2.0 and 0.3; 0.7 is between
    margins = [0.3 * (summed(best) - summed(worst)) for best, worst in pairs]
    expected = -sum(torch.nn.functional.logsigmoid(margin) for margin in margins) / 3
    expected_gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
    for number, (gradient, other) in enumerate(zip(found, expected_gradients, strict=True)):
        other = torch.zeros_like(gradient) if other is None else other
        assert torch.allclose(gradient, other, rtol=1e-6, atol=1e-8), number
    assert metrics["dpo/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["dpo/margin"] == pytest.approx(sum(m.item() for m in margins) / 3, rel=1e-6)
    assert metrics["dpo/accuracy"] == pytest.approx(sum(m.item() > 0 for m in margins) / 3)
    assert metrics["dpo/groups_without_pair"] == 0


def test_a_pair_by_hand_and_a_group_without_one():
    """Margin beta (ln 2 - 0) = ln 2 with beta 1: sigmoid(-ln 2) = 1/3, loss ln 1.5."""
    groups = [group("a", [1.0, 0.0]), group("b", [0.5, 0.5]), group("empty", [])]
    rows = rows_of(Algorithm(name="dpo"), groups, "sum")
    zeros = [np.zeros(len(row)) for row in rows]
    policy = [np.array([7.0, 0.0, 0.0, math.log(2)]), *zeros[1:]]  # the 7 is the prompt's
    metrics = assign_preferences(
        Algorithm(name="dpo", advantages={"beta": 1.0}).advantages, groups, rows, policy, zeros
    )
    assert [row.advantages[0] for row in rows] == pytest.approx([1 / 3, -1 / 3, 0, 0])
    assert metrics["dpo/loss"] == pytest.approx(math.log(1.5))
    assert metrics["dpo/groups_without_pair"] == pytest.approx(2 / 3)
    assert [row.weight[1:].tolist() for row in rows] == [[0.5] * 3] * 4


# Selection and weights ------------------------------------------------------------------------------------------------


def covariance_rows() -> list[TrainingRow]:
    groups = [group(str(number), [0.0] * 4) for number in range(5)]
    rows, random = rows_of(Algorithm(name="dr_grpo"), groups), np.random.default_rng(2)
    for row in rows:
        row.rollout_logprobs = random.normal(size=len(row)).astype(np.float32)
        row.advantages = random.normal(size=len(row)).astype(np.float32)
    return rows


def test_tokens_are_selected_by_their_covariance_over_the_whole_update():
    rows = covariance_rows()
    trained = [(i, t) for i, row in enumerate(rows) for t in range(1, 4)]
    lp, advantage = (
        {(i, t): float(getattr(rows[i], n)[t]) for i, t in trained} for n in ("rollout_logprobs", "advantages")
    )
    means = sum(lp.values()) / 60, sum(advantage.values()) / 60
    covariance = {key: (lp[key] - means[0]) * (advantage[key] - means[1]) for key in trained}

    def selected() -> set[tuple[int, int]]:
        return {(i, t) for i, row in enumerate(rows) for t in range(len(row)) if row.selected[t]}

    metrics = select_tokens(KlCov(kind="kl_cov", share=0.1), rows, (0,))
    assert selected() == set(sorted(trained, key=lambda key: -covariance[key])[:6])
    assert metrics["covariance/selected"] == pytest.approx(0.1)
    within = {key for key in trained if 0.2 < covariance[key] < 1.5}
    loss = ClipCov(kind="clip_cov", share=0.1, covariance_low=0.2, covariance_high=1.5)
    select_tokens(loss, rows, (0,))
    first = selected()
    assert len(first) == 6 and first < within
    select_tokens(loss, rows, (0,))
    assert selected() == first, "the same in a resumed run"
    select_tokens(loss, rows, (1,))
    assert selected() != first, "others in another step"


def test_weights_that_do_not_divide_by_tokens():
    """Two groups of 2 and 1 rollouts; the first rollout has two trajectories of 3 and 5 tokens."""
    members = [
        trajectory("a", 0, 0.0),
        trajectory("a", 0, 0.0, sampled=5, id="a/0b"),
        trajectory("a", 1, 0.0),
        trajectory("b", 0, 0.0),
    ]
    constant = loss_weights(members, "constant", length=10)
    assert all(weight[1:].tolist() == pytest.approx([1 / 30] * len(weight[1:])) for weight in constant)
    assert all(weight[1:].tolist() == [0.5] * len(weight[1:]) for weight in loss_weights(members, "sum"))
    assert all(weight[0] == 0 for weight in constant)
