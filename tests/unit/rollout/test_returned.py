"""Garbage from hooks costs its group, and never the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout import single_turn
from slimx.rollout.hooks import RolloutContext
from tests.unit.rollout.rollout_stand import Stand, config_of, ids_of, one


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def spoil(trajectory: Trajectory, kind: str) -> Any:
    """`trajectory` with a value that nothing can be trained on, or an error in its place."""
    match kind:
        case "id":
            trajectory.token_ids[-1] = 10**6
        case "negative id":
            trajectory.token_ids[-1] = -1
        case "mask":
            trajectory.loss_mask = np.where(trajectory.loss_mask, 255, 0).astype(np.uint8)
        case "logprob":
            trajectory.logprobs[-1] = 1e30
        case "infinite logprob":
            trajectory.logprobs[-1] = -np.inf
        case "record":
            trajectory.turns = list(trajectory.spans)
        case "images":
            trajectory.images = None
        case "version":
            trajectory.spans[-1].version = 7
        case "no spans":
            trajectory.spans = []
        case "status":
            trajectory.status = "bogus"
        case "turns":
            trajectory.turns = [1, 2]
        case "no name":
            trajectory.id = None
        case "another group":
            trajectory.group_id = "g77"
        case "twice":
            return [trajectory, trajectory]
        case "object":
            trajectory.metadata["key"] = object()
        case "surrogate":
            trajectory.metadata["key"] = "\ud800"
        case "SystemExit":
            raise SystemExit(0)
        case "CancelledError":
            raise asyncio.CancelledError
        case "wordless":
            raise Wordless
    return trajectory


KINDS = (
    *("id", "negative id", "mask", "logprob", "version", "no spans", "status", "turns", "no name", "another group"),
    *("twice", "object", "surrogate", "SystemExit", "CancelledError", "wordless"),
    *("infinite logprob", "record", "images"),
)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rollout_that_cannot_be_trained_or_written_drops_its_group_only(kind: str) -> None:
    async def generate(ctx: RolloutContext, prompt: Prompt) -> Any:
        trajectory = await single_turn.generate(ctx, prompt)
        return spoil(trajectory, kind) if (ctx.group_id, ctx.index) == ("g1", 1) else trajectory

    async with Stand(config_of(max_failed_share=1.0), generate=generate, reward=one) as stand:
        batch = await stand.next_batch()
    assert ids_of([batch]) == ["g0", "g2", "g3", "g4"]
    assert batch.dropped == Counter({"generate failed": 1})


async def later(group: Group) -> None:
    await asyncio.sleep(0)


def empties(group: Group) -> bool:
    group.trajectories.clear()
    return True


def leaves(group: Group) -> bool:
    raise SystemExit(0)


@pytest.mark.parametrize("keep", [later, empties, leaves])
async def test_a_filter_that_returns_no_verdict_is_a_failure(keep: Any) -> None:
    def only_first(group: Group) -> Any:
        return keep(group) if group.id == "g1" else True

    async with Stand(config_of(max_failed_share=1.0), reward=one, keep=only_first) as stand:
        batch = await stand.next_batch()
    assert ids_of([batch]) == ["g0", "g2", "g3", "g4"] and batch.dropped == Counter({"keep failed": 1})


@pytest.mark.parametrize("value", [10**400, {"a": 1e308, "b": 1e308}])
async def test_a_reward_whose_sum_is_no_finite_float_fails(value: Any) -> None:
    async def reward(ctx: Any, trajectory: Trajectory) -> Any:
        return value if trajectory.group_id == "g1" else 1.0

    async with Stand(config_of(max_failed_share=1.0), reward=reward) as stand:
        batch = await stand.next_batch()
    assert ids_of([batch]) == ["g0", "g2", "g3", "g4"] and batch.dropped == Counter({"reward failed": 1})


SEEN = (
    "id",
    "mask",
    "logprob",
    "version",
    "no spans",
    "status",
    "turns",
    "no name",
    "another group",
    "object",
    "surrogate",
    "record",
    "images",
)


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("hook", ["trajectory reward", "group reward", "filter"])
async def test_a_group_damaged_by_a_reward_or_a_filter_is_dropped_alone(hook: str, kind: str) -> None:
    async def reward(ctx: Any, judged: Any) -> Any:
        if isinstance(judged, Group):
            if judged.id == "g1":
                spoil(judged.trajectories[1], kind)
            return [1.0] * len(judged.trajectories)
        if (judged.group_id, judged.index) == ("g1", 1):
            spoil(judged, kind)
        return 1.0

    def keep(group: Group) -> bool:
        if group.id == "g1":
            spoil(group.trajectories[1], kind)
        return True

    config = config_of(max_failed_share=1.0)
    hooks: dict[str, Any] = {"reward": one, "keep": keep} if hook == "filter" else {"reward": reward}
    if hook == "group reward":
        config = config.model_copy(update={"reward": config.reward.model_copy(update={"scope": "group"})})
    async with Stand(config, **hooks) as stand:
        batch = await stand.next_batch()
    reason = "keep failed" if hook == "filter" else "reward failed"
    assert ids_of([batch]) == ["g0", "g2", "g3", "g4"] and batch.dropped == Counter({reason: 1})


async def test_a_filter_that_spoils_metadata_drops_its_group_only() -> None:
    def keep(group: Group) -> bool:
        group.prompt.metadata |= {"key": object()} if group.id == "g1" else {}
        return True

    async with Stand(config_of(max_failed_share=1.0), reward=one, keep=keep) as stand:
        batch = await stand.next_batch()
    assert batch.dropped == Counter({"keep failed": 1})
