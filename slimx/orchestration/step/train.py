"""The updates of a step: those of every policy, and beside them the critic's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimx.config.sections.policies import ACTOR
from slimx.data.batch import TrainBatch, TrainingRow
from slimx.data.records import Group
from slimx.orchestration.policies import each, in_order
from slimx.orchestration.run import Run
from slimx.runtime.tasks import all_or_none

Rows = Mapping[str, Sequence[Sequence[TrainingRow]]]
Batches = Mapping[str, list[TrainBatch]]


async def train_step(run: Run, groups: Sequence[Group], rows: Rows, batches: Batches) -> dict[str, float]:
    """One step of every policy, at the same time, and, if there is one, of the critic: beside it where that has ranks
    of its own.

    `rows` and `batches` are the same updates of `groups`, by policy. While the critic warms up the policy is only
    measured."""
    if run.critic is None:
        step, version = run.step, run.version
        metrics = await run.lasting(lambda: _updates(run, groups, rows, batches))
        if run.recovery is not None:
            run.recovery.trained(step, version, batches[ACTOR], metrics)
        return metrics
    critic, own = run.critic, rows[ACTOR]
    if critic.own is not None:
        parts = await all_or_none([_policy_step(run, groups, rows, batches), critic.train_step(own, step=run.step)])
    else:
        parts = [await _policy_step(run, groups, rows, batches), await critic.train_step(own, step=run.step)]
    return parts[0] | parts[1]


async def _policy_step(run: Run, groups: Sequence[Group], rows: Rows, batches: Batches) -> dict[str, float]:
    if run.step < run.config.critic.warmup_steps:
        return await run.trainers.measure_gap(batches[ACTOR][0], version=run.version, mismatch=True)
    return await _updates(run, groups, rows, batches)


async def _updates(run: Run, groups: Sequence[Group], rows: Rows, batches: Batches) -> dict[str, float]:
    versions = run.maker.versions
    metrics = await each(
        run.policies,
        lambda policy: policy.trainers.train_step(batches[policy.name], step=run.step, version=versions[policy.name]),
    )
    if run.records.keeps(run.current) and run.config.rollout.sampled:
        tokens = {
            name: await policy.trainers.trained_tokens(batches[name], rows[name])
            for name, policy in run.policies.items()
        }
        await run.records.keep_trained(run.current, in_order(groups, tokens))
    return metrics
