"""Held-out prompts, answered by the engines' present weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

import numpy as np

from slimx.algorithms.learner import learner_of
from slimx.config.sections.rollout import Eval
from slimx.data.records import Group, Prompt
from slimx.errors import SlimxError
from slimx.orchestration.policies import TrainedPolicy
from slimx.orchestration.run import Run
from slimx.orchestration.step.measure import hook_metrics, part_metrics
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome

FIRST_NUMBER = 1 << 30
"""Number of an evaluation's first group: their seeds are none of the training's, and always the same."""


async def evaluate(run: Run) -> dict[str, float]:
    """`score` of `eval.samples` answers to every held-out prompt; {} without such prompts.

    A prompt whose evaluation fails counts as 0 and is counted in `eval/failed`; if all fail, the run stops."""
    if not any(run.eval_prompts.values()):
        return {}
    with run.phase("eval"):
        outcomes = await run.watched(answer_all(run.maker, run.eval_prompts))
        if (learner := learner_of(run.config.algorithm)) is not None:
            metrics = await run.watched(learner.evaluate(run, outcomes))
        else:
            metrics = {}
            for policy in run.policies.values():
                own = [_of(outcome, policy) for outcome in outcomes]
                metrics |= policy.named(judge(run.config.eval, run.eval_prompts, own))
    groups = [outcome.group for outcome in outcomes if not outcome.failed]
    run.records.evaluation(run.step, run.version, metrics, groups)
    return metrics


async def answer_all(maker: GroupMaker, prompts: Mapping[str, Sequence[Prompt]]) -> list[GroupOutcome]:
    """`eval.samples` answers to each prompt, set after set."""
    everything = [prompt for several in prompts.values() for prompt in several]
    return await asyncio.gather(*(_answer(maker, number, prompt) for number, prompt in enumerate(everything)))


def judge(options: Eval, prompts: Mapping[str, Sequence[Prompt]], outcomes: Sequence[GroupOutcome]) -> dict[str, float]:
    """`score` of what `answer_all` brought, its reward parts and logged numbers, and `eval/failed`.

    Raises SlimxError if every prompt failed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if len(failed) == len(outcomes):
        raise SlimxError(
            f"all {len(failed)} evaluation prompts failed, the last one: {failed[-1].detail}",
        )
    names = [name for name, several in prompts.items() for _ in several]
    rewards: dict[str, list[list[float]]] = {name: [] for name in prompts}
    for name, outcome in zip(names, outcomes, strict=True):
        rewards[name].append([0.0] * options.samples if outcome.failed else answers(outcome.group))
    answered = [trajectory for outcome in outcomes if not outcome.failed for trajectory in outcome.group.trajectories]
    metrics = score(rewards, options.passing, options.ks) | {"eval/failed": float(len(failed))}
    return metrics | part_metrics(answered, "eval_reward") | hook_metrics(answered, "eval_hook")


def _of(outcome: GroupOutcome, policy: TrainedPolicy) -> GroupOutcome:
    """The part of an outcome that is one policy's trajectories."""
    if outcome.failed or not (own := policy.own([outcome.group])):
        return GroupOutcome(outcome.group, outcome.reason or "no answer", outcome.detail or f"none of {policy.name}")
    return GroupOutcome(own[0])


def answers(group: Group) -> list[float]:
    """Reward of each rollout; one of several trajectories has their mean."""
    by_rollout: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        by_rollout.setdefault(trajectory.rollout_id, []).append(trajectory.reward)
    return [float(np.mean(rewards)) for rewards in by_rollout.values()]


def score(rewards: Mapping[str, Sequence[Sequence[float]]], passing: float, ks: Sequence[int]) -> dict[str, float]:
    """`eval/accuracy`, the mean reward of all answers (avg@k), and `eval/pass@k` for each of `ks`; where sets have
    names, for each set too. A k above the number of answers that some prompt of a set has is left out.

    `rewards`: by set, of each prompt all of its answers. pass@k is the unbiased estimate of the chance that one of k
    answers is right, 1 - C(n - c, k) / C(n, k) with c of n right (2107.03374)."""
    everything = [prompt for prompts in rewards.values() for prompt in prompts]
    out = _score(everything, passing, ks, "eval/")
    for name, prompts in rewards.items():
        if name:
            out |= _score(prompts, passing, ks, f"eval/{name}/")
    return out


def _score(prompts: Sequence[Sequence[float]], passing: float, ks: Sequence[int], prefix: str) -> dict[str, float]:
    out = {f"{prefix}accuracy": float(np.mean([np.mean(rewards) for rewards in prompts]))}
    most = min(len(rewards) for rewards in prompts)
    for k in ks:
        if k <= most:
            out[f"{prefix}pass@{k}"] = float(np.mean([_pass_at(k, rewards, passing) for rewards in prompts]))
    return out


def _pass_at(k: int, rewards: Sequence[float], passing: float) -> float:
    wrong = sum(reward < passing for reward in rewards)
    return 1.0 - math.comb(wrong, k) / math.comb(len(rewards), k)


async def _answer(maker: GroupMaker, number: int, prompt: Prompt) -> GroupOutcome:
    return await maker.make(prompt, group_id=f"eval{number}", number=FIRST_NUMBER + number, evaluation=True)
