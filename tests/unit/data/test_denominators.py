"""What the loss of an update is a mean of, by a formula of its own: nested means over units found by id."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from slimx.data.loss_weights import loss_weights
from slimx.data.records import Trajectory
from tests.unit.data.trajectory_stand import trajectory


def nested_mean(losses: list[np.ndarray], batch: list[Trajectory], aggregation: str) -> float:
    """The loss by the definitions of the three means, on float64 per-token losses [L-1] of each trajectory."""
    by_rollout, by_group = defaultdict(list), defaultdict(list)
    for loss, one in zip(losses, batch, strict=True):
        values = [x for x, trained in zip(loss, one.loss_mask[1:], strict=True) if trained]
        by_rollout[one.group_id, one.rollout_id] += values
        by_group[one.group_id] += values
    if aggregation == "token":
        return float(np.mean([x for values in by_group.values() for x in values]))
    units = by_rollout if aggregation == "sample" else by_group
    return float(np.mean([np.mean(values) for values in units.values() if values]))


def batch_of_unequal_groups(rng: np.random.Generator) -> list[Trajectory]:
    """Groups of 1 to 5 rollouts, rollouts of 1 to 3 trajectories, of which some train nothing; rollout ids repeat from
    group to group; in any order."""
    batch = []
    for group in range(int(rng.integers(1, 6))):
        for rollout in range(int(rng.integers(1, 6))):
            for _ in range(int(rng.integers(1, 4))):
                length = int(rng.integers(2, 30))
                mask = rng.integers(0, 2, length) if rng.random() < 0.8 else np.zeros(length)
                batch.append(trajectory(f"g{group}", f"r{rollout}", mask.astype(int).tolist()))
    batch.append(trajectory("g0", "r0", [0, 1, 1]))
    return [batch[i] for i in rng.permutation(len(batch))]


@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt"])
def test_the_weighted_sum_is_the_nested_mean(aggregation):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        batch = batch_of_unequal_groups(rng)
        losses = [rng.normal(size=len(one.token_ids) - 1) for one in batch]
        weights = loss_weights(batch, aggregation)
        total = sum(float((w.astype(np.float64) * loss).sum()) for w, loss in zip(weights, losses, strict=True))
        assert total == pytest.approx(nested_mean(losses, batch, aggregation), rel=1e-5, abs=1e-6), seed
        assert all(not weight[one.loss_mask[1:] == 0].any() for weight, one in zip(weights, batch, strict=True))


def test_a_rollout_of_two_trajectories_counts_once():
    """Rollout a trains 3 tokens in one trajectory and 1 in another; rollout b trains 1."""
    batch = [trajectory("g", "a", [0, 1, 1, 1]), trajectory("g", "b", [0, 1]), trajectory("g", "a", [0, 1])]
    assert [w.tolist() for w in loss_weights(batch, "sample")] == [[0.125] * 3, [0.5], [0.125]]


def test_prompts_have_equal_weight_whatever_the_sizes_of_their_groups():
    batch = [trajectory("p", "a", [0, 1]), trajectory("q", "a", [0, 1]), trajectory("q", "b", [0, 1, 1, 1])]
    assert [w.tolist() for w in loss_weights(batch, "prompt")] == [[0.5], [0.125], [0.125] * 3]
