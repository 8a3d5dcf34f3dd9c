"""Environments of NeMo Gym in the style of Gymnasium: resources servers with /reset and /step.

rollout:
  prompts: resources_servers/blackjack/data/example.jsonl
  map: nemo_gym
  generate: multi_turn
  options: {environment: nemo_gym, environment_options: {url: "http://127.0.0.1:8000"}}
reward: {function: multi_turn}

The server runs in a separate Python environment (`ng_run`); slimx does not need the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.errors import SlimxError
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.hubs.attempts import finite
from slimx.extras.agents.hubs.nemo_gym import MAX_SHOWN, ResourcesServer, response_of
from slimx.json_types import Json

KEY = "rollout.options.environment_options"


class NemoGymSteps(ResourcesServer):
    """One rollout's session with a resources server that has /reset and /step.

    The server parses the model's turns. States are not distinguished, because servers may draw a new state in every
    session.
    """

    _closes = False
    """True if the server has /close."""

    @classmethod
    def check(cls, *, url: str) -> None:
        """Raises SlimxError for an invalid URL."""
        check_url(url, f"{KEY}.url", code="nemo_gym.url")

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Starts a session with the prompt's row and returns the first observation, "" if there is none.

        Raises ToolsLost if the server fails or cannot be reached, SlimxError for a prompt without a row or whose row
        has tools.
        """
        self._begin(prompt)
        if self._row["responses_create_params"].get("tools"):
            raise SlimxError(
                f"prompt {prompt.id!r} has tools in its NeMo Gym row, but the environment nemo_gym reads only text; "
                "set rollout.generate to tools, if the server has /seed_session and /verify",
                code="nemo_gym.tool",
                about=prompt.id,
            )
        data = await self._ask("reset", self._row)
        info = data.get("info")
        self._closes = isinstance(info, Mapping) and info.get("supports_explicit_close") is True
        return str(data.get("observation") or "")

    async def step(self, text: str) -> Step:
        """Sends the model's turn `text`, and returns the next observation and the reward. Raises ToolsLost if the
        server fails or cannot be reached."""
        response = response_of([{"role": "assistant", "content": text}], self._row)
        data = await self._ask("step", self._row | {"response": response})
        reward = finite(data.get("reward", 0.0))
        if reward is None:
            raise self._lost("step", f"returned reward {data['reward']!r}, which is not a finite number")
        info = data.get("info")
        return Step(
            text=str(data.get("observation") or ""),
            reward=reward,
            done=bool(data.get("terminated") or data.get("truncated")),
            info=dict(info) if isinstance(info, Mapping) else {},
        )

    async def close(self) -> None:
        """Ends the session: by /close, if the server offers it."""
        try:
            if self._closes:
                await self._post("close", {})
        finally:
            await super().close()

    async def _ask(self, path: str, body: Json) -> Json:
        """Sends a POST request and returns the response's object. Raises ToolsLost for any other response."""
        status, text = await self._post(path, body)
        if status == 200:
            with suppress(ValueError):
                data = json.loads(text)
                if isinstance(data, dict):
                    return data
        raise self._lost(path, f"answered {status} ({text[:MAX_SHOWN]})")
