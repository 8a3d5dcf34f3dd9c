"""Environments of verifiers: their tasks as prompts, rollouts through the run's proxy, their rubric as the reward.

rollout:
  prompts: prompts.jsonl                        # written by verifiers_server.py
  generate: agent
  options: {agent: verifiers, agent_options: {url: "http://127.0.0.1:8000"}}
reward: {function: verifiers}

The package runs in an environment of its own, where `slimx/extras/agents/hubs/servers/verifiers_server.py` plays one
episode for each request; what it samples, it samples at the base URL of the rollout.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from slimx.data.records import Prompt, Trajectory
from slimx.data.whole import Json
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.http.answers import text_of

KEY = "rollout.options.agent_options"
TASK = "verifiers"
"""Key of a prompt's metadata under which its task is kept."""
MAX_SHOWN = 300
"""Characters of an answer that an error repeats."""


def check(*, url: str, token_env: str | None = None) -> None:
    """Refuse an address that is no URL, and a variable without a token (SlimxError)."""
    check_url(url, f"{KEY}.url", code="verifiers.url")
    if token_env is not None and not os.environ.get(token_env):
        raise SlimxError(
            f"{KEY}.token_env: {token_env} is not set, or empty; export it where the run is started",
            code="verifiers.token",
            about=f"{KEY}.token_env",
        )


async def play(base_url: str, prompt: Prompt, *, url: str, token_env: str | None = None) -> Json:
    """Have the server at `url` play the prompt's task against `base_url`; returns its verdict: `rewards` and `metrics`
    by name, `turns` and `stop`, why it ended. Cancelled, it ends the episode. `token_env`: the variable that holds the
    server's token.

    Raises SlimxError for a prompt without a task, a server that cannot be reached or answers with something else, and
    an episode that failed."""
    task = prompt.metadata.get(TASK)
    if not isinstance(task, Mapping):
        raise SlimxError(
            f"prompt {prompt.id!r} has no task of verifiers in metadata.{TASK}; have verifiers_server.py --prompts "
            "write the prompts",
            code="verifiers.task",
            about=prompt.id,
        )
    status, text = await _post(f"{url.rstrip('/')}/episode", {"task": dict(task), "base_url": base_url}, token_env)
    try:
        verdict = json.loads(text)
    except ValueError:
        verdict = None
    if status == 200 and isinstance(verdict, dict) and isinstance(verdict.get("error"), str):
        raise SlimxError(f"the episode of prompt {prompt.id!r} failed: {verdict['error']}")
    rewards = verdict.get("rewards") if status == 200 and isinstance(verdict, dict) else None
    if not isinstance(rewards, dict) or not rewards or not all(map(_is_finite, rewards.values())):
        raise SlimxError(
            f"the server of verifiers at {url} answered {status} without rewards: {text[:MAX_SHOWN]}",
        )
    return verdict


# As slimx.rewards.needs.checked_by does, which is in a room above: asked before the run starts.
play.check = check  # type: ignore[attr-defined]


async def reward(ctx: Any, trajectory: Trajectory) -> float | dict[str, float]:
    """The weighted rewards of the episode by name; 0 for a rollout that reached a limit of its session before the
    environment could judge it."""
    verdict = trajectory.metadata.get("result")
    return 0.0 if verdict is None else {name: float(value) for name, value in verdict["rewards"].items()}


async def _post(url: str, body: Mapping[str, Any], token_env: str | None) -> tuple[int, str]:
    """Status and text of an answer; its time is bounded by the rollout. Raises SlimxError for a server that is lost."""
    headers = {} if token_env is None else {"Authorization": f"Bearer {os.environ[token_env]}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as answer,
        ):
            return answer.status, await text_of(answer)
    except (aiohttp.ClientError, OSError) as error:
        raise SlimxError(f"the server of verifiers: {url} {raised(error)}") from error


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
