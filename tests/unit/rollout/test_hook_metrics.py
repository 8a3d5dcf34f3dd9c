"""Measurements of hooks reach a step's metrics: from generate and reward, threads and processes, saved and restored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from slimx.config.sections.eval import Eval
from slimx.config.sections.reward import Reward
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.saved.codec import decode, decode_groups, encode, encode_groups
from slimx.observability.tracking.names import find
from slimx.orchestration.step.evaluation import eval_metrics
from slimx.orchestration.step.measure import group_metrics
from slimx.rollout import single_turn
from slimx.rollout.flow.progress import GroupProgress, SavedRollout
from slimx.rollout.flow.reward_processes import RewardProcesses, reward_runner
from slimx.rollout.flow.rollouts import GroupOutcome
from slimx.rollout.flow.tickets import Batch
from slimx.rollout.hook_loading import load_reward
from slimx.rollout.hooks import RewardContext, RolloutContext
from tests.extras.rewards import reward_stand
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import Stand, config_of


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Logs the number of the rollout, and NaN in the first one of each group; counts in two parts."""
    for times in (1, 2):
        ctx.add("asked", times)
    ctx.log("search/hits", ctx.index)
    ctx.log("odd", math.nan if ctx.index == 0 else 2)
    return await single_turn.generate(ctx, prompt)


async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    ctx.log("words", np.float32(len(ctx.text)))
    return {"right": 1.0 - trajectory.index, "short": -0.25}


def batch_of(*trajectories: Trajectory, **metadata: Any) -> Batch:
    prompt = Prompt(id="p", token_ids=[1], metadata=metadata)
    return Batch([Group(id="g", prompt=prompt, trajectories=list(trajectories))])


async def test_numbers_of_hooks_and_reward_parts_are_metrics():
    async with Stand(config_of(), generate=generate, reward=reward) as stand:
        batch = await stand.next_batch()
    found = group_metrics(batch, passing=0.0)
    assert [found[f"hook/search/hits/{leaf}"] for leaf in ("mean", "min", "max", "count")] == [0.5, 0, 1, 8]
    assert (found["hook/odd/mean"], found["hook/odd/count"], found["hook/odd/nonfinite"]) == (2.0, 8, 4)
    assert (found["hook/asked/mean"], found["hook/asked/count"]) == (3, 8)
    assert found["hook/words/count"] == 8 and "hook/words/nonfinite" not in found
    assert (found["reward/part/right/mean"], found["reward/part/right/std"]) == (0.5, 0.5)
    assert (found["reward/part/short/mean"], found["reward/part/short/count"]) == (-0.25, 8)
    assert [name for name in found if find(name) is None] == []


async def test_logged_metrics_are_saved_with_their_group():
    async with Stand(config_of(), generate=generate, reward=reward) as stand:
        batch = await stand.next_batch()
    again = Batch(decode_groups(encode_groups(batch.groups)))
    assert group_metrics(again, 0.0) == group_metrics(batch, 0.0)
    assert again.groups[0].trajectories[1].metrics.keys() == {"asked", "search/hits", "odd", "words"}


async def test_a_resumed_group_has_the_numbers_of_the_rollouts_that_were_done():
    calls = []

    async def counted(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        calls.append(ctx.index)
        return await generate(ctx, prompt)

    prompt, progress = Prompt(id="p", token_ids=[1, 2]), GroupProgress()
    async with Stand(config_of(), generate=counted, reward=reward) as stand:
        whole = await stand.maker.make(prompt, group_id="g", number=0, progress=progress)
        saved = decode(list[SavedRollout], encode(progress.save()[1:]))
        again = await stand.maker.make(prompt, group_id="g", number=0, progress=GroupProgress.restore(saved))
    assert calls == [0, 1, 0], "the second rollout comes from the checkpoint"
    first, second = (group_metrics(Batch([outcome.group]), 0.0) for outcome in (whole, again))
    assert first == second and first["hook/words/count"] == 2


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("reward/mean", 1, "metrics.own_name"),
        ("hook/x/mean", 1, "metrics.own_name"),
        ("hits/mean", 1, "metrics.name"),
        ("two words", 1, "metrics.name"),
        ("/hits", 1, "metrics.name"),
        ("hits", "3", "metrics.number"),
        ("hits", [1.0], "metrics.number"),
    ],
)
def test_a_name_or_value_that_cannot_be_a_metric_is_refused(name, value, code):
    ctx = reward_stand.context()
    with refused(code, about=name):
        ctx.log(name, value)
    assert ctx.metrics == {}


async def test_a_name_logged_by_both_hooks_fails_the_rollout_and_is_named():
    async def twice(ctx: RewardContext, trajectory: Trajectory) -> float:
        ctx.log("odd", 1)
        return 1.0

    async with Stand(config_of(), generate=generate, reward=twice) as stand:
        outcome = await stand.maker.make(Prompt(id="p", token_ids=[1, 2]), group_id="g", number=0)
    assert outcome.reason == "reward failed" and "odd" in outcome.detail
    ctx = reward_stand.context()
    ctx.log("odd", 1)
    with refused("metrics.twice", about="odd"):
        ctx.log("odd", 2)


def test_lengths_go_by_outcome_and_rewards_by_data_set():
    long, short = reward_stand.trajectory(9), reward_stand.trajectory(3)
    long.reward, long.status, short.reward = 0.0, "truncated", 1.0
    found = group_metrics(batch_of(long, short, dataset="gsm8k"), passing=1.0)
    lengths = {key: value for key, value in found.items() if key.endswith("_mean_tokens")}
    assert lengths == {
        "response/passed_mean_tokens": 3.0,
        "response/failed_mean_tokens": 9.0,
        "response/completed_mean_tokens": 3.0,
    }
    assert {key.rpartition("/")[2]: value for key, value in found.items() if key.startswith("source/gsm8k/")} == {
        "trajectories": 2.0,
        "reward": 0.5,
        "mean_tokens": 6.0,
        "truncated": 0.5,
    }
    assert (found["rollout/turns_mean"], found["rollout/turns_max"]) == (1.0, 1.0)
    assert not any(key.startswith("source/") for key in group_metrics(batch_of(long, short), passing=1.0))


def test_held_out_answers_have_separate_reward_parts_and_metrics():
    answer = reward_stand.trajectory()
    answer.reward, answer.reward_parts, answer.metrics = 1.0, {"right": 1.0}, {"hits": 4.0}
    batch = batch_of(answer)
    found = eval_metrics(Eval(prompts="held_out"), {"": [batch.groups[0].prompt]}, [GroupOutcome(batch.groups[0])])
    assert (found["eval_reward/part/right/mean"], found["eval_hook/hits/mean"]) == (1.0, 4.0)
    assert [name for name in found if find(name) is None] == []


async def test_a_reward_in_a_process_logs_as_one_in_a_thread_does():
    logged = {}
    for isolation in ("thread", "process"):
        config = Reward(function=f"{reward_stand.__name__}.logs", isolation=isolation, workers=1)
        runner = reward_runner(config, load_reward(config, {}), "no tokenizer", {})
        assert isinstance(runner, RewardProcesses) == (isolation == "process")
        try:
            ctx = reward_stand.context("text")
            assert await runner.judge(ctx, reward_stand.trajectory()) == (0.5, {})
            logged[isolation] = ctx.metrics
        finally:
            runner.close()
    assert logged["thread"] == logged["process"] == {"seen": 7.0}
