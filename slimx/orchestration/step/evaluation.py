"""Evaluation of the engines' current weights on held-out prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from slimx.algorithms.advantages.group import reward_of
from slimx.algorithms.learner import learner_of
from slimx.config.sections.eval import Eval
from slimx.data.records import Group, Prompt
from slimx.errors import SlimxError
from slimx.orchestration.batches import trajectories_of
from slimx.orchestration.policies import TrainedPolicy
from slimx.orchestration.run import Run
from slimx.orchestration.step.measure import hook_metrics, part_metrics
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome

FIRST_NUMBER = 1 << 30
"""Number of the first group of an evaluation. Sampling seeds derive from group numbers. Because numbers start here in
every evaluation, all evaluations use the same seeds, and training never uses them."""


async def evaluate(run: Run) -> dict[str, float]:
    """Generates answers to every held-out prompt, and returns metrics of their rewards (see `score`); {} if there are
    no held-out prompts, or if an evaluation goes on during training. If generation fails for a prompt, its answers
    score 0, and `eval/failed` counts the prompt. Raises SlimxError if all prompts failed."""
    if not any(run.eval_prompts.values()):
        return {}
    with run.phase("eval"):
        begun = await run.evaluation_engines.begin(run)
        if begun is not None:
            return begun
        return await judged(run, await run.watched(answer_all(run.maker, run.eval_prompts)), run.step)


async def judged(run: Run, outcomes: Sequence[GroupOutcome], step: int) -> dict[str, float]:
    """Returns the metrics of an evaluation of the weights after `step` steps, and saves samples of its answers."""
    learner = learner_of(run.config.algorithm)
    if learner is not None:
        metrics = await run.watched(learner.evaluate(run, outcomes))
    else:
        metrics = {}
        for policy in run.policies.values():
            policy_outcomes = [_of(outcome, policy) for outcome in outcomes]
            metrics |= policy.named(eval_metrics(run.config.eval, run.eval_prompts, policy_outcomes))
    run.records.evaluation(step, metrics, answered_groups(outcomes))
    return metrics


async def answer_all(maker: GroupMaker, prompts: Mapping[str, Sequence[Prompt]]) -> list[GroupOutcome]:
    """Generates as many answers to each prompt as the settings of its set require; returns one outcome per prompt, in
    the order of the prompt sets."""
    sets = maker.config.eval.sets
    rows = [(prompt, sets[name]) for name, of_set in prompts.items() for prompt in of_set]
    return await asyncio.gather(*(_answer(maker, index, *row) for index, row in enumerate(rows)))


def eval_metrics(
    options: Eval, prompts: Mapping[str, Sequence[Prompt]], outcomes: Sequence[GroupOutcome]
) -> dict[str, float]:
    """Returns the metrics of `outcomes`, the result of `answer_all` for `prompts`: accuracy and pass@k (`score`),
    rewards by named part, values that hooks logged, and the number of failed prompts (`eval/failed`). Raises SlimxError
    if every prompt failed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if len(failed) == len(outcomes):
        raise SlimxError(
            f"all {len(failed)} evaluation prompts failed (last error: {failed[-1].detail}); fix this error, and run "
            "the same command again"
        )
    sets = options.sets
    rewards: dict[str, list[list[float]]] = {name: [] for name in prompts}
    names = chain.from_iterable([name] * len(rows) for name, rows in prompts.items())
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome.failed:
            rewards[name].append([0.0] * sets[name].samples)
        else:
            rewards[name].append(answers(outcome.group))
    answered = trajectories_of(answered_groups(outcomes))
    ks = {name: of_set.ks for name, of_set in sets.items()}
    metrics = score(rewards, options.passing, ks) | {"eval/failed": float(len(failed))}
    return metrics | part_metrics(answered, "eval_reward") | hook_metrics(answered, "eval_hook")


def answered_groups(outcomes: Sequence[GroupOutcome]) -> list[Group]:
    """Returns the groups of those `outcomes` that have not failed."""
    return [outcome.group for outcome in outcomes if not outcome.failed]


def _of(outcome: GroupOutcome, policy: TrainedPolicy) -> GroupOutcome:
    """Returns a copy of `outcome` with only the trajectories of `policy`; a failed outcome if the group contains none
    of them."""
    groups = policy.select(answered_groups([outcome]))
    if not groups:
        return GroupOutcome(outcome.group, outcome.reason or "no answer", outcome.detail or f"none of {policy.name}")
    return GroupOutcome(groups[0])


def answers(group: Group) -> list[float]:
    """Returns the reward of each rollout in `group`; for a rollout with several trajectories, the mean of the
    trajectories' rewards."""
    by_rollout: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        by_rollout.setdefault(trajectory.rollout_id, []).append(reward_of(trajectory))
    return [float(np.mean(rewards)) for rewards in by_rollout.values()]


def score(
    rewards: Mapping[str, Sequence[Sequence[float]]], passing: float, ks: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Returns `eval/accuracy`, the mean reward of all answers (avg@k), and `eval/pass@k`, over all prompts, for each k
    of any set, and for each named prompt set, for each of its `ks`. A k larger than the number of answers to some
    prompt is left out.

    `rewards`: rewards of the answers by set and prompt. `passing`: minimum reward at which an answer counts as correct.
    pass@k is the unbiased estimate of the probability that at least one of k answers is correct, 1 - C(n - c, k) / C(n,
    k) if c of n answers are correct (arXiv 2107.03374)."""
    all_prompts = list(chain.from_iterable(rewards.values()))
    out = _score(all_prompts, passing, sorted({*chain.from_iterable(ks.values())}), "eval/")
    for name, prompts in rewards.items():
        if name:
            out |= _score(prompts, passing, ks[name], f"eval/{name}/")
    return out


def _score(prompts: Sequence[Sequence[float]], passing: float, ks: Sequence[int], prefix: str) -> dict[str, float]:
    out = {f"{prefix}accuracy": float(np.mean([np.mean(rewards) for rewards in prompts]))}
    fewest = min(len(rewards) for rewards in prompts)
    for k in ks:
        if k <= fewest:
            out[f"{prefix}pass@{k}"] = float(np.mean([_pass_at(k, rewards, passing) for rewards in prompts]))
    return out


def _pass_at(k: int, rewards: Sequence[float], passing: float) -> float:
    wrong = sum(reward < passing for reward in rewards)
    return 1.0 - math.comb(wrong, k) / math.comb(len(rewards), k)


async def _answer(maker: GroupMaker, index: int, prompt: Prompt, options: Eval) -> GroupOutcome:
    return await maker.make(prompt, group_id=f"eval{index}", number=FIRST_NUMBER + index, evaluation=options)
