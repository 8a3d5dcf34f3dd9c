"""GiGPO (2505.10978): beside the advantage of the whole rollout in its group, one for every turn among all turns of the
group that began in the same state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.algorithms.advantages.estimate import Estimator, group_advantages
from slimx.algorithms.advantages.group import grpo
from slimx.config.sections.objectives import Grpo
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError


class TurnAdvantages(Estimator):
    """GRPO's advantages plus weighted ones of turns."""

    def estimate(self, groups: Sequence[Group]) -> list[float | np.ndarray]:
        options = self.algorithm.advantages
        std = {"normalize_std": options.normalize_std, "eps": options.eps}
        by_group = self.algorithm.model_copy(update={"advantages": Grpo(kind="grpo", **std)})
        out: list[float | np.ndarray] = []
        for group in groups:
            wholes = group_advantages(by_group, group)
            turns = step_advantages(group.trajectories, gamma=options.gamma, **std)
            out += [whole + options.step_coef * turn for whole, turn in zip(wholes, turns, strict=True)]
        return out


def returns(trajectory: Trajectory, gamma: float) -> list[float]:
    """Discounted return of each turn: rewards of this turn and later ones, discounted once per turn.

    The part of `reward` beyond the turns' own rewards falls on the last turn."""
    rewards = [turn.reward for turn in trajectory.turns]
    rewards[-1] += trajectory.reward - sum(rewards)
    out, carry = [0.0] * len(rewards), 0.0
    for number in range(len(rewards) - 1, -1, -1):
        out[number] = carry = rewards[number] + gamma * carry
    return out


def step_advantages(
    trajectories: Sequence[Trajectory], *, gamma: float, normalize_std: bool, eps: float
) -> list[np.ndarray]:
    """Advantages of one group's turns among equal states, at every predicted token: float32 [L-1] per trajectory; 0
    where nothing was sampled, and where no other turn of the group began in that state.

    Raises SlimxError for a trajectory without turns, or with turns that have no state."""
    states: dict[str, list[tuple[int, int]]] = {}
    gains: list[list[float]] = []
    for number, trajectory in enumerate(trajectories):
        sampled = {span.turn for span in trajectory.spans if span.source == "sampled"}
        if not trajectory.turns or max(sampled, default=0) >= len(trajectory.turns):
            raise SlimxError(
                f"trajectory {trajectory.id} says nothing of its turns, among which algorithm.advantages=gigpo "
                "compares; call draft.describe_turn(state_key=...) after each add_sampled in the generate hook",
                code="advantages.turns",
                about=str(trajectory.id),
            )
        gains.append(returns(trajectory, gamma))
        for turn in sorted(sampled):
            key = trajectory.turns[turn].state_key
            if key is None:
                raise SlimxError(
                    f"trajectory {trajectory.id}: turn {turn} has no state_key, by which algorithm.advantages=gigpo "
                    "finds turns that began alike; give it to draft.describe_turn in the generate hook",
                    code="advantages.state_key",
                    about=str(trajectory.id),
                )
            states.setdefault(key, []).append((number, turn))
    advantage: dict[tuple[int, int], float] = {}
    for members in states.values():
        values = grpo([gains[number][turn] for number, turn in members], normalize_std=normalize_std, eps=eps)
        advantage |= dict(zip(members, values.tolist(), strict=True))
    out = []
    for number, trajectory in enumerate(trajectories):
        tokens = np.zeros(len(trajectory.token_ids), np.float32)
        for span in trajectory.spans:
            if span.source == "sampled":
                tokens[span.start : span.stop] = advantage[number, span.turn]
        out.append(tokens[1:])
    return out
