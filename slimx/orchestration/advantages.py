"""Advantages that want more than a group's rewards: log-probs and values of the step's rollouts, before its updates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import numpy as np

from slimx.algorithms.covariance import select_tokens
from slimx.algorithms.dpo import assign_preferences
from slimx.algorithms.token_rewards import assign_advantages
from slimx.config.algorithm import TOKEN_REWARDS
from slimx.data.batch import Row
from slimx.data.records import Group
from slimx.orchestration.run import Run


async def estimate_advantages(run: Run, groups: Sequence[Group], updates: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Fill the advantages of a step's rows, which are those of the groups' trajectories, in order, and what else
    belongs to them (a critic's values and returns, selected tokens). Metrics of the step; none where advantages are the
    group's and stand already."""
    algorithm = run.config.algorithm
    rows = [row for update in updates for row in update]
    metrics: dict[str, float] = {}
    if algorithm.advantages == "dpo":
        policy, reference = await _logprobs(run, rows, "policy"), await _logprobs(run, rows, "reference")
        metrics = assign_preferences(algorithm, groups, rows, policy, reference)
    elif algorithm.advantages in TOKEN_REWARDS:
        reference = await _logprobs(run, rows, "reference") if algorithm.kl_reward_coef else None
        values = await run.critic.values(rows) if run.critic is not None else None
        # A second for a million tokens, in which the loop has engines to watch.
        metrics = await asyncio.to_thread(
            assign_advantages, algorithm, rows, _scores(run, groups, rows), values, reference
        )
    if algorithm.loss in ("clip_cov", "kl_cov"):
        chosen = [
            select_tokens(algorithm, update, (run.config.run.seed, run.step, number))
            for number, update in enumerate(updates)
        ]
        metrics |= {name: float(np.mean([each[name] for each in chosen])) for name in chosen[0]}
    return metrics


def _scores(run: Run, groups: Sequence[Group], rows: Sequence[Row]) -> list[float]:
    """What falls on each trajectory's last token: its reward, or its reward over the group's mean, which is what its
    row's advantage begins with."""
    if run.config.algorithm.advantages == "gae":
        return [trajectory.reward for group in groups for trajectory in group.trajectories]
    return [float(row.advantages[0]) for row in rows]


async def _logprobs(run: Run, rows: Sequence[Row], under: Literal["policy", "reference"]) -> list[np.ndarray]:
    batch = run.packer(rows)
    return batch.unpack(await run.trainers.logprobs(batch, under=under), rows)
