"""The generate hook of agents that speak to an OpenAI-compatible server, whatever they are written in.

rollout:
  generate: agent
  options: {agent: mypackage.agent.solve}        # async def solve(base_url, prompt, **agent_options)
  # options: {command: [python, agent.py]}       # or a program, see slimx.extras.agents.agent_process
  # options: {command: [...], environment: [HF_HOME], metadata: [repository]}   # what of the run and prompt it sees

All that the agent samples through `base_url` becomes the rollout: a trajectory for each of its conversations.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

from slimx.data.records import Prompt, Trajectory
from slimx.dotted import load_function
from slimx.errors import SlimxError
from slimx.extras.agents.agent_process import run_command
from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.session import Session, SessionLimits
from slimx.extras.agents.proxy.tool_calls import find_parser
from slimx.rewards import needs
from slimx.rollout.hooks import ENGINE_DEADLINE, GivenUp, RolloutContext

AGENTS = "slimx.agents"
"""Group of entry points: agents by the names that a configuration has for them."""


def check(
    *,
    agent: str | None = None,
    command: list[str] | None = None,
    agent_options: dict[str, Any] | None = None,
    tool_parser: str = "hermes",
    sampling: str = "run",
    environment: Sequence[str] = (),
    metadata: Sequence[str] = (),
    **_: Any,
) -> None:
    """Refuse an agent that cannot be called, before the run starts."""
    if (agent is None) == (command is None):
        raise SlimxError(
            "rollout.options: give either agent, a dotted path, or command, a program and its arguments",
            code="agent.program",
            about="rollout.options",
        )
    if agent is not None:
        needs.check(_load(agent, agent_options))
    if command is not None and (not command or shutil.which(command[0]) is None):
        raise SlimxError(
            f"rollout.options.command: there is no program {command[:1]}; give its path",
            code="agent.program",
            about="rollout.options.command",
        )
    for option, names in (("environment", environment), ("metadata", metadata)):
        if isinstance(names, str):
            raise SlimxError(
                f"rollout.options.{option} is {names!r}; give a list of names",
                code=f"agent.{option}",
                about=f"rollout.options.{option}",
            )
    if missing := [name for name in environment if name not in os.environ]:
        raise SlimxError(
            f"rollout.options.environment names {missing[0]}, which is not set; export it where the run is started",
            code="agent.environment",
            about=missing[0],
        )
    if sampling not in ("run", "strict"):
        raise SlimxError(
            f"rollout.options.sampling is {sampling!r}; choose run or strict",
            code="agent.sampling",
            about="rollout.options.sampling",
        )
    find_parser(tool_parser, "")


@needs.checked_by(check)
async def generate(
    ctx: RolloutContext,
    prompt: Prompt,
    *,
    agent: str | None = None,
    command: list[str] | None = None,
    agent_options: dict[str, Any] | None = None,
    max_context: int | None = None,
    max_requests: int = 64,
    max_tokens: int | None = None,
    sampling: str = "run",
    tool_parser: str = "hermes",
    separate_reasoning: bool = False,
    environment: Sequence[str] = (),
    metadata: Sequence[str] = (),
) -> list[Trajectory]:
    """The conversations of one agent with the policy.

    `max_context`: tokens of a conversation; None: what can be trained. `max_requests` and `max_tokens` (sampled, in all
    answers together) bound the session: further requests are refused, those under way are not. `sampling`: "run" gives
    an agent that asks for another temperature or top_p the run's, "strict" refuses it. `tool_parser`: a name for
    `slimx.extras.agents.proxy.tool_calls.find_parser`. `separate_reasoning`: what stands before </think> is no answer's
    content. `environment`: names of variables that a program gets besides `slimx.extras.agents.agent_process.ALLOWED`;
    `metadata`: keys of the prompt's metadata that it gets.

    Metadata of each trajectory: `requests`, `overridden` (parameters that the run decided, and what nobody does here),
    `forced` (answers made by a grammar, which are not trained; absent without any), `errors` (requests answered with an
    error, counted by its code; absent without any), `branch` (its number), and `result`, what the agent returned or the
    program wrote. An agent that fails after it reached a limit has none, and the conversations that it could not go on
    with are truncated. Logs `tool_calls` and `unreadable_calls`.

    Raises GivenUp for one that fails otherwise, or that
    asks for nothing.
    """
    if ctx.proxy is None:
        raise SlimxError("agents sample through the run's proxy, and there is none here")
    if prompt.messages is None:
        raise SlimxError(
            f"prompt {prompt.id!r} has token ids; an agent needs messages", code="agent.prompt", about=prompt.id
        )
    reading = AnswerReader(
        ctx.tokenizer, find_parser(tool_parser, ctx.address, ctx.headers), separate_reasoning, tool_parser
    )
    context = min(max_context or ctx.proxy.context, ctx.proxy.context)
    limits = SessionLimits(context=context, requests=max_requests, sampled=max_tokens)
    session = Session(ctx, reading, limits, strict=sampling == "strict")
    name = agent or f"command {command[0] if command else ''}"
    result: Any = None
    try:
        async with ctx.proxy.session(session) as base_url:
            if command is not None:
                result = await run_command(command, base_url, prompt, environment, metadata)
            else:
                result = await _load(agent or "", agent_options)(base_url, prompt)
    except Exception as error:
        if not session.limited:
            told = f"; it had been told: {session.last_error}" if session.last_error else ""
            what = str(error) if isinstance(error, SlimxError) else f"{type(error).__name__}: {error}"
            raise GivenUp(_reason(session, "agent failed"), f"{name} failed ({what}){told}") from error
    if not (trajectories := session.trajectories({"result": result})):
        told = f"; it was told: {session.last_error}" if session.last_error else ""
        raise GivenUp(_reason(session, "agent without answers"), f"{name} ended without an answer of the policy{told}")
    if not ctx.evaluation and not any(trajectory.loss_mask.any() for trajectory in trajectories):
        text = f"{name} forced every answer of the policy (tool_choice), which leaves none to learn from"
        raise GivenUp("agent without trained answers", text)
    ctx.add("tool_calls", session.tool_calls)
    ctx.add("unreadable_calls", session.unreadable_calls)
    return trajectories


def _reason(session: Session, reason: str) -> str:
    """Returns `reason`, unless the agent had last been told that no engine answered in time."""
    return ENGINE_DEADLINE if session.last_error and session.last_error.code == "engine_deadline" else reason


def _load(agent: str, options: dict[str, Any] | None) -> Any:
    given = ("rollout.options.agent_options", options or {})
    return load_function(
        "rollout.options.agent", agent, ("base_url", "prompt"), is_async=True, options=given, group=AGENTS
    )
