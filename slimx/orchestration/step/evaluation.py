"""Evaluation: the engines' current weights answer the held-out prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from slimx.algorithms.advantages.group import reward_of
from slimx.algorithms.learner import learner_of
from slimx.config.sections.rollout import Eval
from slimx.data.records import Group, Prompt
from slimx.errors import SlimxError
from slimx.orchestration.batches import trajectories_of
from slimx.orchestration.policies import TrainedPolicy
from slimx.orchestration.run import Run
from slimx.orchestration.step.measure import hook_metrics, part_metrics
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome

FIRST_NUMBER = 1 << 30
"""Number of an evaluation's first group: its seeds never occur in training, and are the same in every evaluation."""


async def evaluate(run: Run) -> dict[str, float]:
    """Evaluates `eval.samples` answers to every held-out prompt and returns `score`; {} without such prompts.

    A failed prompt scores 0 and is counted in `eval/failed`; if all fail, the run stops."""
    if not any(run.eval_prompts.values()):
        return {}
    with run.phase("eval"):
        outcomes = await run.watched(answer_all(run.maker, run.eval_prompts))
        learner = learner_of(run.config.algorithm)
        if learner is not None:
            metrics = await run.watched(learner.evaluate(run, outcomes))
        else:
            metrics = {}
            for policy in run.policies.values():
                policy_outcomes = [_of(outcome, policy) for outcome in outcomes]
                metrics |= policy.named(judge(run.config.eval, run.eval_prompts, policy_outcomes))
    groups = answered_groups(outcomes)
    run.records.evaluation(run.step, run.version, metrics, groups)
    return metrics


async def answer_all(maker: GroupMaker, prompts: Mapping[str, Sequence[Prompt]]) -> list[GroupOutcome]:
    """Generates `eval.samples` answers to each prompt, in the order of the sets."""
    rows = chain.from_iterable(prompts.values())
    return await asyncio.gather(*(_answer(maker, index, prompt) for index, prompt in enumerate(rows)))


def judge(options: Eval, prompts: Mapping[str, Sequence[Prompt]], outcomes: Sequence[GroupOutcome]) -> dict[str, float]:
    """Returns `score` of the outcomes of `answer_all`, their reward parts and logged metrics, and `eval/failed`.

    Raises SlimxError if every prompt failed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if len(failed) == len(outcomes):
        raise SlimxError(
            f"all {len(failed)} evaluation prompts failed, the last one: {failed[-1].detail}",
        )
    rewards: dict[str, list[list[float]]] = {name: [] for name in prompts}
    names = chain.from_iterable([name] * len(rows) for name, rows in prompts.items())
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome.failed:
            rewards[name].append([0.0] * options.samples)
        else:
            rewards[name].append(answers(outcome.group))
    answered = trajectories_of(answered_groups(outcomes))
    metrics = score(rewards, options.passing, options.ks) | {"eval/failed": float(len(failed))}
    return metrics | part_metrics(answered, "eval_reward") | hook_metrics(answered, "eval_hook")


def answered_groups(outcomes: Sequence[GroupOutcome]) -> list[Group]:
    """Returns the groups of the prompts that did not fail."""
    return [outcome.group for outcome in outcomes if not outcome.failed]


def _of(outcome: GroupOutcome, policy: TrainedPolicy) -> GroupOutcome:
    """Returns the part of an outcome that is one policy's trajectories."""
    groups = policy.select(answered_groups([outcome]))
    if not groups:
        return GroupOutcome(outcome.group, outcome.reason or "no answer", outcome.detail or f"none of {policy.name}")
    return GroupOutcome(groups[0])


def answers(group: Group) -> list[float]:
    """Returns the reward of each rollout; the mean if it has several trajectories."""
    by_rollout: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        by_rollout.setdefault(trajectory.rollout_id, []).append(reward_of(trajectory))
    return [float(np.mean(rewards)) for rewards in by_rollout.values()]


def score(rewards: Mapping[str, Sequence[Sequence[float]]], passing: float, ks: Sequence[int]) -> dict[str, float]:
    """Returns `eval/accuracy`, the mean reward of all answers (avg@k), and `eval/pass@k` for each of `ks`; also per set
    if sets have names. A k larger than the number of answers to some prompt of a set is left out.

    `rewards`: set -> prompt -> answers. pass@k is the unbiased estimate of the probability that one of k answers is
    right, 1 - C(n - c, k) / C(n, k) with c of n right (2107.03374)."""
    all_prompts = list(chain.from_iterable(rewards.values()))
    out = _score(all_prompts, passing, ks, "eval/")
    for name, prompts in rewards.items():
        if name:
            out |= _score(prompts, passing, ks, f"eval/{name}/")
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


async def _answer(maker: GroupMaker, index: int, prompt: Prompt) -> GroupOutcome:
    return await maker.make(prompt, group_id=f"eval{index}", number=FIRST_NUMBER + index, evaluation=True)
