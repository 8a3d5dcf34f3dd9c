"""The generate hook of multi-turn environments: model and environment alternate until one of them is done.

rollout:
  generate: multi_turn
  options: {environment: python, max_turns: 6}

Run an environment that computes (a simulator, a compiler, a game) in a process: environment_processes: 8.
"""

from __future__ import annotations

import asyncio

from slimx.data.records import Prompt, Trajectory
from slimx.dotted import imported
from slimx.environments.base import ENVIRONMENTS, Begin
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rewards.needs import checked_by
from slimx.rollout.hooks import RewardContext, RolloutContext


def check(
    *, environment: str, environment_options: Json | None = None, environment_processes: int = 0, **_: object
) -> None:
    """Raises SlimxError for an environment that cannot be created or whose `check` raises."""
    if (
        isinstance(environment_processes, bool)
        or not isinstance(environment_processes, int)
        or environment_processes < 0
    ):
        raise SlimxError(
            f"rollout.options.environment_processes is {environment_processes!r}; give the number of environment calls "
            "that may compute at once, or 0 for the driver's event loop",
            code="environment.option",
            about="rollout.options.environment_processes",
        )
    options = environment_options or {}
    kind = imported("rollout.options.environment", environment, ENVIRONMENTS)
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(kind, name, None))]
    if missing:
        raise SlimxError(
            f"rollout.options.environment: {environment} has no {missing[0]}; an environment has reset, step and close "
            "(slimx.environments.base)",
            code="environment.methods",
            about="rollout.options.environment",
        )
    try:
        getattr(kind, "check", kind)(**options)
    except TypeError as error:
        raise SlimxError(
            f"rollout.options.environment_options: {environment} refuses them ({error})",
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
    """Returns one trajectory of at most `max_turns` turns of the model; observations are not trained on.

    A truncated turn (no end token) ends the rollout. Metadata: `rewards` of each turn, `turns`, `ended` (done, turns or
    length) and the last step's `info`. Logs `tool_calls` and the steps' `counts`. If the environment has state keys,
    each turn is recorded with its reward and the state that it began in.

    Raises DeadlineError for a step that takes longer than `turn_deadline` seconds. `environment_processes`: maximum
    number of concurrent environment calls, with one process per environment; 0: in the driver's event loop."""
    world = ctx.environments.make(
        environment,
        environment_options or {},
        deadline_s=turn_deadline,
        rollout=f"{ctx.group_id}/{ctx.index}",
        processes=environment_processes,
    )
    draft = ctx.draft(prompt)
    rewards: list[float] = []
    info: Json = {}
    ended = "turns"
    tool_calls = 0
    try:
        start = await world.reset(prompt, ctx.seed)
        if not isinstance(start, Begin):
            start = Begin(text=start)
        state = start.state_key
        if start.text:
            draft.add_inserted(ctx.turn(start.text, after=draft.token_ids))
        for turn in range(max_turns):
            completion = await ctx.engine.generate(draft.token_ids, turn=turn)
            draft.add_sampled(completion)
            if state is not None:
                draft.describe_turn(state_key=state)
            if completion.finish_reason != "stop":
                ended = "length"
                break
            text = str(ctx.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
            step = await world.step(text)
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
            draft.add_inserted(ctx.turn(step.text, role=step.role, after=draft.token_ids))
    finally:
        await asyncio.shield(world.close())
    ctx.add("tool_calls", tool_calls)
    return draft.finish(metadata={"rewards": rewards, "turns": draft.turn, "ended": ended, "info": info})


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the sum of the environment's rewards of all turns."""
    return float(sum(trajectory.metadata["rewards"]))
