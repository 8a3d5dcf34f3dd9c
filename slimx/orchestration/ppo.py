"""What a critic adds to a step: the advantages before the policy's update, and an update of its own beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from slimx.algorithms.ppo import assign_advantages
from slimx.data.batch import Row, TrainBatch
from slimx.data.records import Group
from slimx.orchestration.run import Run


async def estimate_advantages(run: Run, groups: Sequence[Group], updates: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Fill advantages, values and returns of a step's rows, which are those of the groups' trajectories, in order."""
    rows = [row for update in updates for row in update]
    scores = [trajectory.reward for group in groups for trajectory in group.trajectories]
    reference = None
    if run.config.algorithm.kl_reward_coef:
        batch = run.packer(rows)
        reference = batch.unpack(await run.trainers.reference_logprobs(batch), rows)
    values = await run.critic.values(rows)
    # A second for a million tokens, in which the loop has engines to watch.
    return await asyncio.to_thread(assign_advantages, run.config.algorithm, rows, scores, values, reference)


async def train_step(run: Run, rows: Sequence[Sequence[Row]], batches: list[TrainBatch]) -> dict[str, float]:
    """One step of the policy and, if there is one, of the critic: at the same time where they have ranks of their own.

    `rows` and `batches` are the same updates. While the critic warms up the policy is only measured."""
    if run.critic is None:
        return await run.trainers.train_step(batches, step=run.step, version=run.version)
    if run.critic.own is not None:
        policy, critic = await _at_once(_policy_step(run, batches), run.critic.train_step(rows, step=run.step))
    else:
        policy, critic = await _policy_step(run, batches), await run.critic.train_step(rows, step=run.step)
    return policy | critic


async def _policy_step(run: Run, batches: list[TrainBatch]) -> dict[str, float]:
    if run.step < run.config.critic.warmup_steps:
        return await run.trainers.measure_gap(batches[0], version=run.version)
    return await run.trainers.train_step(batches, step=run.step, version=run.version)


async def _at_once(*work: Coroutine[Any, Any, dict[str, float]]) -> list[dict[str, float]]:
    """The results of all; the first failure ends the wait for the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
