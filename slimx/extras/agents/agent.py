"""The generate hook `agent`: runs an agent, in any language, that samples through an OpenAI-compatible server.

rollout:
  generate: agent
  options: {agent: mypackage.agent.solve}        # async def solve(base_url, prompt, **agent_options)
  # options: {command: [python, agent.py]}       # or a program, see slimx.extras.agents.agent_process
  # options: {command: [...], environment: [HF_HOME], metadata: [repository]}   # variables and metadata it receives

Everything that the agent samples through `base_url` becomes the rollout, with one trajectory per conversation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence

from slimx.data.records import Prompt, Trajectory
from slimx.dotted import load_function
from slimx.errors import SlimxError
from slimx.extras.agents.agent_process import run_command
from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.session import Session, SessionLimits
from slimx.extras.agents.proxy.tool_calls import find_parser
from slimx.json_types import Json
from slimx.rewards import needs
from slimx.rollout.hooks import ENGINE_DEADLINE, GivenUp, RolloutContext

AGENTS = "slimx.agents"
"""Entry point group that registers agents under short names for `rollout.options.agent`."""


def check(
    *,
    agent: str | None = None,
    command: list[str] | None = None,
    agent_options: Json | None = None,
    tool_parser: str = "hermes",
    sampling: str = "run",
    environment: Sequence[str] = (),
    metadata: Sequence[str] = (),
    **_: object,
) -> None:
    """Raises SlimxError for invalid options, such as an agent that cannot be called. Called before the run starts."""
    if (agent is None) == (command is None):
        raise SlimxError(
            f"rollout.options sets {'neither agent nor command' if agent is None else 'both agent and command'}; set "
            "either `agent` to a dotted path or a registered name, or `command` to a program with its arguments",
            code="agent.program",
            about="rollout.options",
        )
    if agent is not None:
        needs.check(_load(agent, agent_options))
    if command is not None and (not command or shutil.which(command[0]) is None):
        raise SlimxError(
            f"rollout.options.command: the program {next(iter(command), '')!r} was not found; give the "
            "full path of an executable program",
            code="agent.program",
            about="rollout.options.command",
        )
    for option, names in (("environment", environment), ("metadata", metadata)):
        if isinstance(names, str):
            raise SlimxError(
                f"rollout.options.{option} must be a list of names, not {names!r}; set "
                f"rollout.options.{option} to [{names}]",
                code=f"agent.{option}",
                about=f"rollout.options.{option}",
            )
    missing = [name for name in environment if name not in os.environ]
    if missing:
        raise SlimxError(
            f"rollout.options.environment names the environment variable {missing[0]}, which is not set; export "
            f"{missing[0]} before starting the run",
            code="agent.environment",
            about=missing[0],
        )
    if sampling not in ("run", "strict"):
        raise SlimxError(
            f"rollout.options.sampling is {sampling!r}; set rollout.options.sampling to `run` or `strict`",
            code="agent.sampling",
            about="rollout.options.sampling",
        )
    find_parser(tool_parser, "")


def check_prompts(
    prompts: Iterable[Prompt], *, agent: str | None = None, agent_options: Json | None = None, **_: object
) -> None:
    """Checks the prompts with the check that `slimx.rewards.needs.checks_prompts` attached to the agent function, if
    any. Called before the run starts."""
    check = needs.prompt_check(_load(agent, agent_options)) if agent is not None else None
    if check is not None:
        check(prompts, **(agent_options or {}))


@needs.checks_prompts(check_prompts)
@needs.checked_by(check)
async def generate(
    ctx: RolloutContext,
    prompt: Prompt,
    *,
    agent: str | None = None,
    command: list[str] | None = None,
    agent_options: Json | None = None,
    max_context: int | None = None,
    max_requests: int = 64,
    max_tokens: int | None = None,
    sampling: str = "run",
    tool_parser: str = "hermes",
    separate_reasoning: bool = False,
    environment: Sequence[str] = (),
    metadata: Sequence[str] = (),
) -> list[Trajectory]:
    """Runs one agent and returns its conversations with the policy as trajectories.

    `agent`: dotted path or registered name of an async function, called with `agent_options`. `command`: program and
    arguments, instead of `agent`. `max_context`: maximum length of a conversation in tokens; None means the maximum
    length of a trainable trajectory. `max_requests`: maximum number of requests. `max_tokens`: maximum number of
    sampled tokens in all responses together; None for no limit. At either limit, new requests are refused and running
    ones continue. `sampling`: "run" overrides an agent's temperature and top_p with those of the run, "strict" refuses
    requests with other values. `tool_parser`: name of the tool-call parser, or dotted path of a function
    (`slimx.extras.agents.proxy.tool_calls.find_parser`). `separate_reasoning`: True to remove the text before </think>
    from the content. `environment`: environment variables that a program inherits in addition to
    `slimx.extras.agents.agent_process.ALLOWED`. `metadata`: keys of the prompt's metadata that a program receives.

    Metadata of each trajectory: `requests`, `overridden` (parameters that the run overrode, and ignored features),
    `forced` (number of responses constrained by a grammar, which are not trained on; absent if 0), `errors` (error
    responses by code; absent if none), `branch` (index of the trajectory), and `result`, the agent's return value or
    the program's output. An agent that fails after reaching a limit has no result, and the conversations that the limit
    stopped are truncated. Logs `tool_calls` and `unreadable_calls`. Raises GivenUp for an agent that fails otherwise,
    samples nothing, or, in training, samples nothing that can be trained on.
    """
    if ctx.proxy is None:
        raise SlimxError(f"agents need a proxy, but policy {ctx.policy} has none; pass ctx.policies['actor'] instead")
    if prompt.messages is None:
        raise SlimxError(
            f"prompt {prompt.id!r} has token_ids and no messages, but an agent needs messages; give the prompt "
            "messages instead of token_ids",
            code="agent.prompt",
            about=prompt.id,
        )
    parse_tools = find_parser(tool_parser, ctx.address, ctx.headers)
    reading = AnswerReader(ctx.tokenizer, parse_tools, separate_reasoning, tool_parser)
    context = min(max_context or ctx.proxy.context, ctx.proxy.context)
    limits = SessionLimits(context=context, requests=max_requests, sampled=max_tokens)
    images = prompt.metadata.get("images") or ()
    session = Session(ctx, reading, limits, strict=sampling == "strict", images=images)
    name = agent or f"command {command[0] if command else ''}"
    result: object = None
    try:
        async with ctx.proxy.session(session) as base_url:
            if command is not None:
                result = await run_command(command, base_url, prompt, environment, metadata)
            else:
                result = await _load(agent or "", agent_options)(base_url, prompt)
    except Exception as error:
        if not session.limited:
            reason = str(error) if isinstance(error, SlimxError) else f"{type(error).__name__}: {error}"
            raise _failure(session, "agent failed", f"{name} failed ({reason})") from error
    return _trajectories(ctx, session, name, result)


def _trajectories(ctx: RolloutContext, session: Session, name: str, result: object) -> list[Trajectory]:
    """Returns, as trajectories, the conversations of a session that has ended, and logs the session's counts.

    `name`: name of the agent, for the error message. `result`: value of `result` in the trajectories' metadata. Raises
    GivenUp if the agent sampled nothing, or if a training rollout has no token that can be trained on.
    """
    trajectories = session.trajectories({"result": result})
    if not trajectories:
        raise _failure(session, "agent without answers", f"{name} exited without sampling from the policy")
    if not ctx.evaluation and not any(trajectory.loss_mask.any() for trajectory in trajectories):
        text = f"{name} constrained every answer of the policy by tool_choice, which leaves none to train on"
        raise GivenUp("agent without trained answers", text)
    ctx.add("tool_calls", session.tool_calls)
    ctx.add("unreadable_calls", session.unreadable_calls)
    return trajectories


def _failure(session: Session, reason: str, text: str) -> GivenUp:
    """Returns the error that gives up a failed agent's rollout, with the last error response that the agent received.

    `reason`: failure reason, replaced by ENGINE_DEADLINE if that response was due to the engines' deadline.
    """
    error = session.last_error
    if error is None:
        return GivenUp(reason, text)
    if error.code == "engine_deadline":
        reason = ENGINE_DEADLINE
    return GivenUp(reason, f"{text} (last error response that the agent received: {error})")


def _load(agent: str, options: Json | None) -> Callable[..., Awaitable[object]]:
    return load_function(
        "rollout.options.agent",
        agent,
        ("base_url", "prompt"),
        is_async=True,
        options=("rollout.options.agent_options", options or {}),
        group=AGENTS,
    )
