"""Environments of the package verifiers: tasks as prompts, rollouts through the run's proxy, and rubrics as rewards.

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
"""Key under which a prompt's metadata contains the task."""
MAX_SHOWN = 300
"""Maximum length of a response that an error message quotes, in characters."""


def check(*, url: str, token_env: str | None = None) -> None:
    """Raises SlimxError if the URL is invalid, or if the environment variable named by `token_env` is unset or
    empty."""
    check_url(url, f"{KEY}.url", code="verifiers.url")
    if token_env is not None and not os.environ.get(token_env):
        raise SlimxError(
            f"{KEY}.token_env names the environment variable {token_env}, which is unset or empty; export "
            f"{token_env} before starting the run",
            code="verifiers.token",
            about=f"{KEY}.token_env",
        )


async def play(base_url: str, prompt: Prompt, *, url: str, token_env: str | None = None) -> Json:
    """Plays the prompt's task on the server at `url`, which samples at `base_url`.

    Returns the outcome of the episode: `rewards` and `metrics` by name, the number of `turns`, and `stop`, the
    condition that ended it. Cancelling this call ends the episode. `token_env`: environment variable with the server's
    token.

    Raises SlimxError for a prompt without a task, an unreachable server, an unexpected response, and a failed episode.
    """
    task = prompt.metadata.get(TASK)
    if not isinstance(task, Mapping):
        raise SlimxError(
            f"prompt {prompt.id!r} has no verifiers task in metadata.{TASK}; generate the prompt file with the option "
            "--prompts of slimx/extras/agents/hubs/servers/verifiers_server.py",
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
            f"the verifiers server at {url} answered {status} without rewards ({text[:MAX_SHOWN]}); find the cause "
            "in the server's output",
        )
    return verdict


# The check runs before the run starts. Set here as slimx.rewards.needs.checked_by would, which may not be imported.
play.check = check  # type: ignore[attr-defined]  # mypy does not support attributes of functions


async def reward(ctx: object, trajectory: Trajectory) -> float | dict[str, float]:
    """Returns the weighted rewards of the episode by name; 0 if a session limit ended the episode."""
    verdict = trajectory.metadata.get("result")
    if verdict is None:
        return 0.0
    return {name: float(value) for name, value in verdict["rewards"].items()}


async def _post(url: str, body: Json, token_env: str | None) -> tuple[int, str]:
    """Sends a POST request and returns the response's status and text. Sets no deadline, because the rollout's deadline
    applies. Raises SlimxError for an unreachable server."""
    headers = {} if token_env is None else {"Authorization": f"Bearer {os.environ[token_env]}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as response,
        ):
            return response.status, await text_of(response)
    except (aiohttp.ClientError, OSError) as error:
        raise SlimxError(
            f"the verifiers server at {url} cannot be reached ({raised(error)}); start the server, or correct "
            "rollout.options.agent_options.url"
        ) from error


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
