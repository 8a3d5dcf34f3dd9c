"""Advantages that want more than a group's rewards: log-probs and values of the step's rollouts, before its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from slimx.algorithms.advantages.estimate import Step, finish_advantages
from slimx.config.sections.policies import ACTOR
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.orchestration.run import Run
from slimx.runtime.tasks import in_thread


async def estimate_advantages(
    run: Run, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
) -> dict[str, float]:
    """Let trainers and critic score a step's rows, and finish the advantages of these (`finish_advantages`)."""
    algorithm, rows = run.config.algorithm, [row for update in updates for row in update]
    pairs = algorithm.advantages.demonstrated
    policy = await _logprobs(run, rows, "policy") if pairs else None
    reference = await _logprobs(run, rows, "reference") if pairs or algorithm.kl_reward_coef else None
    values = await run.critic.values(rows) if run.critic is not None else None
    step = Step(
        groups=groups,
        updates=updates,
        policy=policy,
        reference=reference,
        values=values,
        seed=(run.config.run.seed, run.step),
    )
    # A second for a million tokens, in which the loop has engines to watch.
    return await in_thread(finish_advantages, algorithm, step)


async def _logprobs(run: Run, rows: Sequence[TrainingRow], under: Literal["policy", "reference"]) -> list[np.ndarray]:
    actor = run.policies[ACTOR]
    batch = actor.packer(rows)
    return batch.unpack(await run.recovery.lasting(lambda: actor.trainers.logprobs(batch, under=under)), rows)
