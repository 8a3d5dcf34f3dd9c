"""Direct preference optimisation (2305.18290) as a policy gradient.

The loss of a pair is -log sigmoid(m) with the margin m = beta ((c - c_ref) - (r - r_ref)), where c and r are the summed
log-probs of the chosen and the rejected answer. Its gradient is -beta sigmoid(-m) (grad c - grad r): that of the plain
policy gradient with the advantage +beta sigmoid(-m) at every token of the chosen answer and - that of the rejected.
With the margin measured under the very weights that the gradient is of (one update per step), this is DPO to the last
term, and neither packing nor layout has to keep a pair together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.algorithms.advantages.estimate import Estimator, Step
from slimx.algorithms.advantages.group import mean
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.extras.preferences.objectives import Dpo


class Preferences(Estimator):
    """Advantages of DPO, which begin as 0."""

    def finish(self, step: Step) -> dict[str, float]:
        return assign_preferences(self.algorithm.advantages, step.groups, step.rows, step.policy, step.reference)


def assign_preferences(
    options: Dpo,
    groups: Sequence[Group],
    rows: Sequence[TrainingRow],
    policy: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
) -> dict[str, float]:
    """Give the rows of a step their advantages; the metrics of the step.

    `rows`, and the log-probs [n] of each under policy and reference, are those of the groups' trajectories, in order.
    The pair of a group is its rollout with the highest reward and the one with the lowest; a group in which all are
    equal has none, and the rollouts between teach nothing."""
    margins, at = [], 0
    for group in groups:
        if not group.trajectories:
            continue
        by_rollout: dict[str, list[int]] = {}
        for offset, trajectory in enumerate(group.trajectories):
            by_rollout.setdefault(trajectory.rollout_id, []).append(at + offset)
        reward = {
            rollout: mean([group.trajectories[number - at].reward for number in numbers])
            for rollout, numbers in by_rollout.items()
        }
        at += len(group.trajectories)
        best, worst = max(reward, key=reward.__getitem__), min(reward, key=reward.__getitem__)
        for numbers in by_rollout.values():
            for number in numbers:
                rows[number].advantages = np.zeros(len(rows[number]), np.float32)
        if reward[best] == reward[worst]:
            continue
        chosen, rejected = (
            sum(_log_ratio(rows[number], policy[number], reference[number]) for number in by_rollout[rollout])
            for rollout in (best, worst)
        )
        margin = options.beta * (chosen - rejected)
        margins.append(margin)
        strength = options.beta * np.exp(-np.logaddexp(0.0, margin))  # beta sigmoid(-margin)
        for rollout, sign in ((best, 1), (worst, -1)):
            for number in by_rollout[rollout]:
                rows[number].advantages += np.float32(sign * strength)
    metrics = {"dpo/groups_without_pair": 1 - len(margins) / len(groups)}
    if margins:
        metrics |= {
            "dpo/loss": float(np.mean(np.logaddexp(0.0, -np.array(margins)))),
            "dpo/margin": float(np.mean(margins)),
            "dpo/accuracy": float(np.mean(np.array(margins) > 0)),
        }
    return metrics


def _log_ratio(row: TrainingRow, policy: np.ndarray, reference: np.ndarray) -> float:
    trained = row.weight > 0
    return float((policy[trained].astype(np.float64) - reference[trained]).sum())
