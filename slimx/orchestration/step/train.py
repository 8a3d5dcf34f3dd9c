"""Optimizer steps of a training step, for all policies and for the critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

import numpy as np

from slimx.algorithms.advantages.estimate import StepData, finish_advantages
from slimx.algorithms.learner import learner_of
from slimx.config.sections.policies import ACTOR
from slimx.data.batch import TrainBatch, TrainingRow
from slimx.data.records import Group
from slimx.orchestration.batches import batch_metrics
from slimx.orchestration.policies import in_order, metrics_of
from slimx.orchestration.run import Run, StepRows
from slimx.runtime.tasks import all_or_none, in_thread

Batches = Mapping[str, list[TrainBatch]]


async def train_step(run: Run, groups: Sequence[Group], rows: StepRows) -> dict[str, float]:
    """Completes the advantages in `rows`, packs the rows into batches, and trains on the batches. Returns all metrics
    of the step. `groups`: groups from which the rows were made."""
    algorithm = run.config.algorithm
    metrics: dict[str, float] = {}
    if algorithm.needs_whole_step:
        with run.phase("values"):
            metrics |= await run.watched(estimate_advantages(run, groups, rows[ACTOR]))
    with run.phase("prepare"):
        batches = {}
        for name, policy in run.policies.items():
            batches[name] = [policy.packer(update) for update in rows[name]]
            metrics |= policy.named(batch_metrics(batches[name]))
    with run.phase("train"):
        learner = learner_of(algorithm)
        if learner is not None:
            return metrics | await run.watched(learner.train(run, groups, rows[ACTOR]), training=True)
        return metrics | await run.watched(_train(run, groups, rows, batches), training=True)


async def _train(run: Run, groups: Sequence[Group], rows: StepRows, batches: Batches) -> dict[str, float]:
    """Trains all policies concurrently. A critic is trained at the same time if it has dedicated ranks, otherwise
    afterwards. Returns the metrics.

    `rows` and `batches`: for each policy, the training data of each update made from `groups`, before and after
    packing. While the critic warms up, no policy is trained, and only the log-prob gap of the policy `actor` is
    measured."""
    critic = run.critic
    if critic is None:
        step = run.step
        version = run.version
        metrics = await run.recovery.with_retry(lambda: _updates(run, groups, rows, batches))
        run.recovery.trained(step, version, batches[ACTOR], metrics)
        return metrics
    if critic.dedicated is None:
        metrics = await _policy_step(run, groups, rows, batches)
        return metrics | await critic.train_step(rows[ACTOR], step=run.step)
    works = [_policy_step(run, groups, rows, batches), critic.train_step(rows[ACTOR], step=run.step)]
    policy, values = await all_or_none(works)
    return policy | values


async def _policy_step(run: Run, groups: Sequence[Group], rows: StepRows, batches: Batches) -> dict[str, float]:
    critic = run.config.critic
    if critic is not None and run.step < critic.warmup_steps:
        trainers = run.policies[ACTOR].trainers
        return await trainers.measure_gap(batches[ACTOR][0], version=run.version, mismatch=True)
    return await _updates(run, groups, rows, batches)


async def _updates(run: Run, groups: Sequence[Group], rows: StepRows, batches: Batches) -> dict[str, float]:
    versions = run.maker.versions
    metrics = await metrics_of(
        run.policies,
        lambda policy: policy.trainers.train_step(batches[policy.name], step=run.step, version=versions[policy.name]),
    )
    if run.records.keeps(run.current) and run.config.rollout.sampled:
        tokens = {}
        for name, policy in run.policies.items():
            tokens[name] = await policy.trainers.trained_tokens(batches[name], rows[name])
        await run.records.keep_trained(run.current, in_order(groups, tokens))
    return metrics


async def estimate_advantages(
    run: Run, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
) -> dict[str, float]:
    """Computes the values and log-probs that the advantages of `updates` need, on the critic and the trainers, and
    completes the advantages. Returns the metrics of `finish_advantages`."""
    algorithm = run.config.algorithm
    rows = list(chain.from_iterable(updates))
    pairs = algorithm.advantages.demonstrated
    policy = reference = values = None
    if pairs:
        policy = await _logprobs(run, rows, "policy")
    if pairs or algorithm.kl_reward_coef:
        reference = await _logprobs(run, rows, "reference")
    if run.critic is not None:
        values = await run.critic.values(rows)
    step = StepData(
        groups=groups,
        updates=updates,
        policy=policy,
        reference=reference,
        values=values,
        seed=(run.config.run.seed, run.step),
    )
    # In a thread, because it takes a second for a million tokens, during which the event loop must watch the engines.
    return await in_thread(finish_advantages, algorithm, step)


async def _logprobs(run: Run, rows: Sequence[TrainingRow], under: Literal["policy", "reference"]) -> list[np.ndarray]:
    """Returns the log-probs of the tokens in `rows` under the policy or the reference."""
    actor = run.policies[ACTOR]
    batch = actor.packer(rows)
    logprobs = await run.recovery.with_retry(lambda: actor.trainers.logprobs(batch, under=under))
    return batch.unpack(logprobs, rows)
