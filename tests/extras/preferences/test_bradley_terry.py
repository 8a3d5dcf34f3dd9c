"""The Bradley-Terry loss by its derivatives, and the rows that pairs give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimx.data.records import Group, Prompt, Span, Trajectory
from slimx.extras.preferences.bradley_terry import assign_slopes, pair_rows, preference_metrics
from slimx.extras.preferences.trainer import score_loss
from slimx.extras.token_level.value_loss import ValueInputs
from tests.refusals import refused


def trajectory(name: str, length: int, reward: float) -> Trajectory:
    return Trajectory(
        id=name,
        rollout_id=name,
        group_id="g",
        index=0,
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=np.array([0] + [1] * (length - 1), np.uint8),
        logprobs=np.full(length, np.nan, np.float32),
        spans=[Span(start=0, stop=length, source="inserted")],
        reward=reward,
    )


def group(number: int, *trajectories: Trajectory) -> Group:
    return Group(id=f"g{number}", prompt=Prompt(id=f"p{number}", messages=[]), trajectories=list(trajectories))


def pairs() -> list[Group]:
    """Returns three pairs; the rejected answer of the second comes first."""
    return [
        group(0, trajectory("a", 4, 1.0), trajectory("b", 6, 0.0)),
        group(1, trajectory("c", 3, 0.0), trajectory("d", 5, 1.0)),
        group(2, trajectory("e", 2, 1.0), trajectory("f", 2, 0.0)),
    ]


def test_a_row_reads_its_last_token_and_weighs_it_alone_chosen_first():
    rows = pair_rows(pairs())
    assert [len(row) for row in rows] == [4, 6, 5, 3, 2, 2]
    for row in rows:
        assert row.tokens.tolist() == list(range(1, len(row) + 1))
        assert row.weight[-1] == pytest.approx(1 / 3) and not row.weight[:-1].any()


def test_a_group_that_is_no_pair_is_refused_by_name():
    for bad in (group(0, trajectory("a", 4, 1.0)), group(0, trajectory("a", 4, 1.0), trajectory("b", 4, 1.0))):
        with refused("data.pair", about="g0"):
            pair_rows([bad])


def test_the_gradient_by_every_score_is_that_of_torch_and_so_is_the_loss():
    rows, margins = pair_rows(pairs()), [0.0, 0.7, -0.2]
    scores = torch.tensor([0.3, -1.2, 2.0, 2.5, 40.0, -60.0], dtype=torch.float64, requires_grad=True)
    reference = -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2] - torch.tensor(margins).double()).mean()
    (gradient,) = torch.autograd.grad(reference, scores)
    values = [np.append(np.full(len(row) - 1, 7.0), score) for row, score in zip(rows, scores.tolist(), strict=True)]
    metrics = assign_slopes(rows, values, margins)
    assert metrics["preference/loss"] == pytest.approx(reference.item())
    assert metrics["preference/accuracy"] == pytest.approx(2 / 3)
    assert metrics["preference/margin"] == pytest.approx((1.5 - 0.5 + 100) / 3)
    for row, value, expected in zip(rows, values, gradient.tolist(), strict=True):
        predicted = torch.tensor(value, requires_grad=True)
        columns = {name: torch.from_numpy(getattr(row, name)) for name in ("weight", "advantages", "rollout_logprobs")}
        inputs = ValueInputs(predicted=predicted, **columns)
        loss, measured = score_loss(inputs)
        (found,) = torch.autograd.grad(loss, predicted)
        assert (
            found[-1].item() == pytest.approx(expected, rel=1e-6, abs=1e-12) and not found[:-1].any() and measured == {}
        )


def test_a_score_that_is_not_trained_may_be_anything():
    values = torch.tensor([float("inf"), float("nan"), 2.0])
    ones = torch.ones(3)
    inputs = ValueInputs(predicted=values, weight=torch.tensor([0.0, 0, 1]), advantages=ones, rollout_logprobs=-ones)
    loss, _ = score_loss(inputs)
    assert loss.item() == -2.0


def test_pairs_that_score_alike_count_half():
    assert preference_metrics(np.array([1.0, 0.0, -1.0, 2.0]))["preference/accuracy"] == 0.625
