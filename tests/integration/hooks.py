"""Hooks that the integration tests name in their configurations."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from slimx.algorithms.inputs import LossInputs
from slimx.data.records import Group, Prompt, Trajectory
from slimx.environments.base import Step
from slimx.extras.agents import tools
from slimx.extras.rewards import exact
from slimx.rollout import single_turn
from slimx.rollout.hooks import RewardContext, RolloutContext
from tests.extras.boxes.repairs import IN_ONE_CALL, shell


async def digits(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the share of digits in the answer: random weights differ in it, so every step has a gradient."""
    return sum(character.isdigit() for character in ctx.text) / max(1, len(ctx.text))


PACE = "SLIMX_TEST_PACE"
"""Variable with the path of a file: the highest weight version whose rollouts `paced_digits` rewards."""


async def paced_digits(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns `digits`, once a test allows the weight version that sampled the answer."""
    version = max(span.version for span in trajectory.spans if span.version is not None)
    while PACE in os.environ and version > int(Path(os.environ[PACE]).read_text()):
        await asyncio.sleep(0.05)
    return await digits(ctx, trajectory)


async def above_zero(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns a positive reward for every rollout; those of a group differ."""
    return 1.0 / (1 + trajectory.index)


async def version_in_evaluations(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns `digits`; in an evaluation the version that sampled all of the answer, -1 if several did."""
    versions = {span.version for span in trajectory.spans if span.version is not None}
    if ctx.evaluation:
        return float(versions.pop()) if len(versions) == 1 else -1.0
    return await digits(ctx, trajectory)


async def judged(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """Returns `digits`, and a score of the tokens' log-probs under a frozen model."""
    likely = await ctx.engines["judge"].logprobs(trajectory.token_ids.tolist())
    return {"digits": await digits(ctx, trajectory), "judge": sum(likely) / len(likely) / 100}


async def across_a_publication(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates a single turn, brief in an evaluation and before the first publication.

    Later it requests answers until one has tokens of two versions, or of the last that a run of four steps samples
    with."""
    brief = ctx.evaluation or not ctx.version
    for turn in count():
        draft = ctx.draft(prompt)
        sampling = {"max_new_tokens": 8} if brief else {"ignore_eos": True}
        answer = await ctx.engine.generate(draft.token_ids, sampling, turn=turn)
        if brief or len(answer.versions) > 1 or answer.versions[0][2] >= 3:
            draft.add_sampled(answer)
            return draft.finish()
    raise AssertionError("unreachable")


async def recording(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates a single turn, and appends every trajectory's tokens to the file that the prompt names. After `hold`
    trajectories it waits until the file `go` exists."""
    if "hold" in prompt.metadata:
        while _lines(prompt.metadata["record"]) >= prompt.metadata["hold"] and not Path(prompt.metadata["go"]).exists():
            await asyncio.sleep(0.05)
    trajectory = await single_turn.generate(ctx, prompt)
    if not ctx.evaluation:
        line = {"id": trajectory.id, "tokens": trajectory.token_ids.tolist()}
        with Path(prompt.metadata["record"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return trajectory


def rewards_as_advantages(groups: list[Group]) -> list[float]:
    """Returns rewards unchanged."""
    return [trajectory.reward for group in groups for trajectory in group.trajectories]


def weighted_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns minus the sum of advantage-weighted log-probs."""
    loss = -(inputs.weight * inputs.advantages * torch.where(inputs.weight > 0, inputs.logprobs, 0.0)).sum()
    return loss, {"loss/own": loss.detach()}


async def sum_in_parts(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 for a right sum (`right`), and -0.1 where the answer is no number (`form`)."""
    right = await exact.reward(ctx, trajectory)
    return {"right": right, "form": 0.0 if ctx.text.strip().isdigit() else -0.1}


async def described_turn(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates one turn, whose state is that of the prompt."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    draft.describe_turn(state_key=prompt.id)
    return draft.finish()


def _lines(file: str) -> int:
    return len(Path(file).read_text().splitlines()) if Path(file).exists() else 0


class Echo:
    """An environment that is done after one turn, a fifth of a second later."""

    async def reset(self, prompt: Prompt, seed: int) -> str:
        return ""

    async def step(self, text: str) -> Step:
        await asyncio.sleep(0.2)
        return Step(done=True)

    async def close(self) -> None: ...


async def echoed(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates a single turn for an `Echo` in a process of its own."""
    world = ctx.environments.make(
        "tests.integration.hooks.Echo", {}, deadline_s=5, rollout=f"{ctx.group_id}/{ctx.index}", processes=4
    )
    draft = ctx.draft(prompt)
    try:
        await world.reset(prompt, ctx.seed)
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, {"ignore_eos": True}))
        await world.step("")
    finally:
        await asyncio.shield(world.close())
    return draft.finish()


WRITES = r"""root ::= "<tool_call>{\"name\": \"shell\", \"arguments\": {\"command\": \"" echo "\"}}</tool_call>"
echo ::= "echo " [1-9] [0-9] " > value"
"""


async def writing_numbers(ctx: RolloutContext, prompt: Prompt, **options: Any) -> Trajectory:
    """Runs a terminal whose policy, which has learnt no words, chooses the digits of a command."""
    return await _generate(WRITES, ctx, prompt, **options)


IDLE = shell("true")


async def repairing_or_not(ctx: RolloutContext, prompt: Prompt, **options: Any) -> Trajectory:
    """Runs a terminal whose policy chooses to repair what a task of `examples/repair` asks for, or nothing."""
    grammar = f"root ::= {json.dumps(IN_ONE_CALL[prompt.id])} | {json.dumps(IDLE)}"
    return await _generate(grammar, ctx, prompt, **options)


async def _generate(grammar: str, ctx: RolloutContext, prompt: Prompt, **options: Any) -> Trajectory:
    engine = replace(ctx.engine, sampling=dict(ctx.engine.sampling) | {"ebnf": grammar})
    return await tools.generate(replace(ctx, engine=engine), prompt, **options)


async def held_at_step_2(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates a single turn; in the evaluation of step 2 only once the file `go` exists, which the prompt names."""
    while ctx.evaluation and ctx.version == 2 and not Path(prompt.metadata["go"]).exists():
        await asyncio.sleep(0.05)
    return await single_turn.generate(ctx, prompt)
