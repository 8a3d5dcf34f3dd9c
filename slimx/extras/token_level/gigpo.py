"""GiGPO (arXiv:2505.10978): the advantage of a turn is the advantage of its rollout within the group, plus a weighted
advantage of the turn among all turns of the group that started from the same state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.algorithms.advantages.estimate import Estimator, group_advantages
from slimx.algorithms.advantages.group import grpo, reward_of
from slimx.config.sections.objectives import Gigpo, Grpo
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError


class TurnAdvantages(Estimator):
    """Advantage estimator of GiGPO: the advantages of GRPO, plus weighted advantages of turns."""

    def estimate(self, groups: Sequence[Group]) -> list[float | np.ndarray]:
        options = self.algorithm.advantages.narrow(Gigpo)
        grpo_options = Grpo(kind="grpo", normalize_std=options.normalize_std, eps=options.eps)
        by_group = self.algorithm.model_copy(update={"advantages": grpo_options})
        out: list[float | np.ndarray] = []
        for group in groups:
            rollouts = group_advantages(by_group, group)
            turns = step_advantages(
                group.trajectories, gamma=options.gamma, normalize_std=options.normalize_std, eps=options.eps
            )
            out += [rollout + options.step_coef * turn for rollout, turn in zip(rollouts, turns, strict=True)]
        return out


def returns(trajectory: Trajectory, gamma: float) -> list[float]:
    """Returns the discounted return of each turn: the rewards of this and all later turns, discounted by `gamma` once
    per turn.

    The trajectory's `reward` minus the sum of its turns' rewards is added to the last turn."""
    rewards = [turn.reward for turn in trajectory.turns]
    rewards[-1] += reward_of(trajectory) - sum(rewards)
    out = [0.0] * len(rewards)
    carry = 0.0
    for turn in reversed(range(len(rewards))):
        carry = rewards[turn] + gamma * carry
        out[turn] = carry
    return out


def step_advantages(
    trajectories: Sequence[Trajectory], *, gamma: float, normalize_std: bool, eps: float
) -> list[np.ndarray]:
    """Returns the advantage of each turn among the turns of one group that started from the same state, for every
    predicted token: float32 [L-1] per trajectory. It is 0 for tokens that were not sampled, and for a turn whose state
    no other turn of the group has. `gamma`: discount per turn; `normalize_std`: True to divide by the standard
    deviation plus `eps`, as in `grpo`.

    Raises SlimxError for a trajectory without turns, and for a turn without a state."""
    states: dict[str, list[tuple[int, int]]] = {}
    gains: list[list[float]] = []
    for index, trajectory in enumerate(trajectories):
        sampled = {span.turn for span in trajectory.spans if span.source == "sampled"}
        if not trajectory.turns or max(sampled, default=0) >= len(trajectory.turns):
            raise SlimxError(
                f"trajectory {trajectory.id} does not describe each of its turns, as algorithm.advantages=gigpo "
                "requires; call draft.describe_turn(state_key=...) after each draft.add_sampled in the generate hook",
                code="advantages.turns",
                about=str(trajectory.id),
            )
        gains.append(returns(trajectory, gamma))
        for turn in sorted(sampled):
            key = trajectory.turns[turn].state_key
            if key is None:
                raise SlimxError(
                    f"turn {turn} of trajectory {trajectory.id} has no state_key, by which "
                    "algorithm.advantages=gigpo matches turns; pass a state_key to draft.describe_turn in the "
                    "generate hook",
                    code="advantages.state_key",
                    about=str(trajectory.id),
                )
            states.setdefault(key, []).append((index, turn))
    advantage: dict[tuple[int, int], float] = {}
    for members in states.values():
        values = grpo([gains[index][turn] for index, turn in members], normalize_std=normalize_std, eps=eps)
        advantage |= dict(zip(members, values.tolist(), strict=True))
    out = []
    for index, trajectory in enumerate(trajectories):
        tokens = np.zeros(len(trajectory.token_ids), np.float32)
        for span in trajectory.spans:
            if span.source == "sampled":
                tokens[span.start : span.stop] = advantage[index, span.turn]
        out.append(tokens[1:])
    return out
