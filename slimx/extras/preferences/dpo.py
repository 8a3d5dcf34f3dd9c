"""Direct preference optimization (DPO, arXiv 2305.18290) as a policy gradient.

The loss of a pair is -log sigmoid(m) with the margin m = beta ((c - c_ref) - (r - r_ref)), where c and r are the summed
log-probs of the chosen and the rejected answer under the policy, and c_ref and r_ref those under the reference. Its
gradient is -beta sigmoid(-m) (grad c - grad r). The plain policy gradient has the same gradient if the advantage is
beta sigmoid(-m) at every token of the chosen answer, and -beta sigmoid(-m) at every token of the rejected one. If
margins are computed with the same weights as the gradient (one update per step), this is exactly DPO, and the answers
of a pair may be in different micro-batches and on different ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.algorithms.advantages.estimate import Estimator, StepData
from slimx.algorithms.advantages.group import mean
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.extras.preferences.objectives import Dpo


class Preferences(Estimator):
    """Estimator of DPO's advantages, which remain 0 until a step's log-probs are known."""

    def finish(self, step: StepData) -> dict[str, float]:
        policy = step.policy or ()
        reference = step.reference or ()
        return assign_preferences(self.algorithm.advantages.narrow(Dpo), step.groups, step.rows, policy, reference)


def assign_preferences(
    options: Dpo,
    groups: Sequence[Group],
    rows: Sequence[TrainingRow],
    policy: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
) -> dict[str, float]:
    """Sets the advantages of the rows of a step, and returns the step's metrics.

    `rows`: rows of the trajectories in `groups`, in order. `policy` and `reference`: for each row, the log-probs
    [positions] under the policy and the reference. A group's pair consists of its rollouts with the highest and the
    lowest reward. All other rollouts, and groups whose rollouts have equal rewards, have an advantage of 0.
    """
    margins = []
    first = 0
    for group in groups:
        if not group.trajectories:
            continue
        by_rollout: dict[str, list[int]] = {}
        rewards: dict[str, list[float]] = {}
        for index, trajectory in enumerate(group.trajectories, first):
            assert trajectory.reward is not None, "the trajectories of a step must have rewards"
            by_rollout.setdefault(trajectory.rollout_id, []).append(index)
            rewards.setdefault(trajectory.rollout_id, []).append(trajectory.reward)
            rows[index].advantages = np.zeros(len(rows[index]), np.float32)
        first += len(group.trajectories)
        reward = {rollout: mean(values) for rollout, values in rewards.items()}
        best = max(reward, key=reward.__getitem__)
        worst = min(reward, key=reward.__getitem__)
        if reward[best] == reward[worst]:
            continue
        chosen = 0.0
        for index in by_rollout[best]:
            chosen += _log_ratio(rows[index], policy[index], reference[index])
        rejected = 0.0
        for index in by_rollout[worst]:
            rejected += _log_ratio(rows[index], policy[index], reference[index])
        margin = options.beta * (chosen - rejected)
        margins.append(margin)
        strength = options.beta * np.exp(-np.logaddexp(0.0, margin))  # this is beta sigmoid(-margin)
        for index in by_rollout[best]:
            rows[index].advantages += np.float32(strength)
        for index in by_rollout[worst]:
            rows[index].advantages += np.float32(-strength)
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
