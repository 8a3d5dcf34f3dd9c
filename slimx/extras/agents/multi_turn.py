"""The generate hook `multi_turn`: model and environment alternate until one of them is done.

rollout:
  generate: multi_turn
  options: {environment: python, max_turns: 6}

Set `environment_processes: 8` to run environments that compute for long (simulators, compilers, games) in processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slimx.data.records import Prompt, Trajectory
from slimx.dotted import imported
from slimx.environments.base import ENVIRONMENTS, Begin, Environment
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rewards.needs import checked_by
from slimx.rollout.draft import Draft
from slimx.rollout.hooks import RewardContext, RolloutContext


def check(
    *, environment: str, environment_options: Json | None = None, environment_processes: int = 0, **_: object
) -> None:
    """Raises SlimxError for an environment that cannot be created or whose `check` raises. Called before the run
    starts."""
    if (
        isinstance(environment_processes, bool)
        or not isinstance(environment_processes, int)
        or environment_processes < 0
    ):
        raise SlimxError(
            f"rollout.options.environment_processes must be an integer of at least 0, not {environment_processes!r}; "
            "set the maximum number of concurrent environment calls, or 0 to run them in the driver's event loop",
            code="environment.option",
            about="rollout.options.environment_processes",
        )
    options = environment_options or {}
    kind = imported("rollout.options.environment", environment, ENVIRONMENTS)
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(kind, name, None))]
    if missing:
        raise SlimxError(
            f"rollout.options.environment: {environment} has no method {missing[0]}; define the methods reset, "
            "step and close as described in slimx.environments.base",
            code="environment.methods",
            about="rollout.options.environment",
        )
    try:
        getattr(kind, "check", kind)(**options)
    except TypeError as error:
        raise SlimxError(
            f"rollout.options.environment_options: {environment} rejects these options ({error}); set only options "
            f"that {environment} accepts",
            code="environment.option",
            about="rollout.options.environment_options",
        ) from error


@checked_by(check)
async def generate(
    ctx: RolloutContext,
    prompt: Prompt,
    *,
    environment: str,
    environment_options: Json | None = None,
    max_turns: int = 8,
    turn_deadline: float = 60.0,
    environment_processes: int = 0,
) -> Trajectory:
    """Plays one episode and returns it as a trajectory; observations are not trained on.

    `environment`: dotted path or registered name of the environment's class. `environment_options`: keyword arguments
    of that class. `max_turns`: maximum number of the model's turns. `turn_deadline`: maximum time in seconds for one
    step. `environment_processes`: maximum number of concurrent environment calls, with one process per environment; 0
    runs them in the driver's event loop.

    A turn that reaches the token limit ends the rollout. Metadata: `rewards` of all turns, `turns`, `ended` (done,
    turns or length) and the last step's `info`. Logs `tool_calls` and the steps' `counts`. If the environment has state
    keys, every turn is recorded with its reward and the state in which it began. Raises DeadlineError if a step takes
    too long.
    """
    world = ctx.environments.make(
        environment,
        environment_options or {},
        deadline_s=turn_deadline,
        rollout=f"{ctx.group_id}/{ctx.index}",
        processes=environment_processes,
    )
    draft = ctx.draft(prompt)
    try:
        start = await world.reset(prompt, ctx.seed)
        if not isinstance(start, Begin):
            start = Begin(text=start)
        if start.text or start.images:
            await _insert(ctx, draft, start.text, start.images)
        metadata = await _play(ctx, world, draft, start.state_key, max_turns)
    finally:
        await asyncio.shield(world.close())
    return draft.finish(metadata=metadata)


async def _play(ctx: RolloutContext, environment: Environment, draft: Draft, state: str | None, max_turns: int) -> Json:
    """Plays the model's turns and the environment's steps, and returns the metadata of the trajectory.

    `draft`: trajectory to which the turns are appended. `state`: key of the state in which the first turn begins; None
    if the environment does not distinguish states.
    """
    rewards: list[float] = []
    info: Json = {}
    ended = "turns"
    tool_calls = 0
    for turn in range(max_turns):
        completion = await ctx.engine.generate(draft.token_ids, turn=turn, images=draft.images)
        draft.add_sampled(completion)
        if state is not None:
            draft.describe_turn(state_key=state)
        if completion.finish_reason != "stop":
            ended = "length"
            break
        text = str(ctx.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
        step = await environment.step(text)
        rewards.append(float(step.reward))
        info = step.info
        tool_calls += step.tool_calls
        for name, value in step.counts.items():
            ctx.add(name, value)
        if state is not None:
            draft.describe_turn(state_key=state, reward=float(step.reward))
            state = step.state_key
        if step.done:
            ended = "done"
            break
        await _insert(ctx, draft, step.text, step.images, step.role)
    ctx.add("tool_calls", tool_calls)
    return {"rewards": rewards, "turns": draft.turn, "ended": ended, "info": info}


async def _insert(
    ctx: RolloutContext, draft: Draft, text: str, images: Sequence[object] = (), role: str = "user"
) -> None:
    """Appends a turn of the environment to `draft`: `images`, then `text`."""
    if not images:
        draft.add_inserted(ctx.turn(text, role=role, after=draft.token_ids))
        return
    parts: list[Json] = [{"type": "image", "image": image} for image in images]
    if text:
        parts.append({"type": "text", "text": text})
    token_ids, placed = await ctx.turn_with_images(parts, role=role, after=draft.token_ids)
    draft.add_inserted(token_ids, images=placed)


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the sum of the environment's rewards over all turns."""
    return float(sum(trajectory.metadata["rewards"]))
