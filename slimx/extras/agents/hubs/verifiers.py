"""Environments of verifiers: their tasks as prompts, rollouts through the run's proxy, their rubric as the reward.

rollout:
  prompts: prompts.jsonl                        # written by verifiers_server.py
  generate: agent
  options: {agent: verifiers, agent_options: {url: "http://127.0.0.1:8000"}}
reward: {function: verifiers}

The package runs in a separate Python environment, where `slimx/extras/agents/hubs/servers/verifiers_server.py` plays
one episode per request and samples at the base URL of the rollout.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress

import aiohttp

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.http.responses import text_of
from slimx.json_types import Json

KEY = "rollout.options.agent_options"
TASK = "verifiers"
"""Key of the task in a prompt's metadata."""
MAX_SHOWN = 300
"""Maximum length of a quoted response in an error, in characters."""


def check(*, url: str, token_env: str | None = None) -> None:
    """Raises SlimxError for an invalid URL, and for an environment variable without a token."""
    check_url(url, f"{KEY}.url", code="verifiers.url")
    if token_env is not None and not os.environ.get(token_env):
        raise SlimxError(
            f"{KEY}.token_env: {token_env} is not set, or empty; export it where the run is started",
            code="verifiers.token",
            about=f"{KEY}.token_env",
        )


async def play(base_url: str, prompt: Prompt, *, url: str, token_env: str | None = None) -> Json:
    """Plays the prompt's task on the server at `url`, sampling at `base_url`. Returns the verdict: `rewards` and
    `metrics` by name, `turns`, and `stop`, the reason of its end. Cancelling ends the episode. `token_env`: environment
    variable with the server's token.

    Raises SlimxError for a prompt without a task, an unreachable server, any other response, and a failed episode."""
    task = prompt.metadata.get(TASK)
    if not isinstance(task, Mapping):
        raise SlimxError(
            f"prompt {prompt.id!r} has no task of verifiers in metadata.{TASK}; write the prompts with "
            "verifiers_server.py --prompts",
            code="verifiers.task",
            about=prompt.id,
        )
    status, text = await _post(f"{url.rstrip('/')}/episode", {"task": dict(task), "base_url": base_url}, token_env)
    verdict: Json = {}
    if status == 200:
        with suppress(ValueError):
            content = json.loads(text)
            if isinstance(content, dict):
                verdict = content
    if isinstance(verdict.get("error"), str):
        raise SlimxError(f"the episode of prompt {prompt.id!r} failed: {verdict['error']}")
    rewards = verdict.get("rewards")
    if not isinstance(rewards, dict) or not rewards or not all(map(_is_finite, rewards.values())):
        raise SlimxError(
            f"the server of verifiers at {url} answered {status} without rewards: {text[:MAX_SHOWN]}",
        )
    return verdict


# As slimx.rewards.needs.checked_by does, which this module must not import: runs before the run starts.
play.check = check  # type: ignore[attr-defined]  # mypy does not support attributes of functions


async def reward(ctx: object, trajectory: Trajectory) -> float | dict[str, float]:
    """Returns the weighted rewards of the episode by name; 0 for a rollout that reached a limit of its session before
    the verdict."""
    verdict = trajectory.metadata.get("result")
    if verdict is None:
        return 0.0
    return {name: float(value) for name, value in verdict["rewards"].items()}


async def _post(url: str, body: Json, token_env: str | None) -> tuple[int, str]:
    """Returns status and text of a response. The rollout bounds its time. Raises SlimxError for an unreachable
    server."""
    headers = {} if token_env is None else {"Authorization": f"Bearer {os.environ[token_env]}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as response,
        ):
            return response.status, await text_of(response)
    except (aiohttp.ClientError, OSError) as error:
        raise SlimxError(f"the server of verifiers: {url} {raised(error)}") from error


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
