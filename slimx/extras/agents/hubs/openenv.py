"""Environments of OpenEnv: servers that a rollout has a session with, over their WebSocket.

rollout:
  generate: multi_turn
  options:
    environment: openenv
    environment_options: {url: "http://127.0.0.1:8000", text_options: {action: message, shows: echoed_message}}

The server runs in an environment of its own; slimx needs nothing of the package.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from slimx.data.records import Prompt
from slimx.data.whole import Json
from slimx.dotted import imported
from slimx.environments.base import Begin, Step
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.hubs.attempts import StepEnvironment, finite
from slimx.extras.agents.hubs.views import MAX_TEXT, answered, seed_of_prompt
from slimx.extras.http.answers import unredirected

KEY = "rollout.options.environment_options"
FIELDS = "slimx.extras.agents.hubs.openenv.Fields"
MAX_MESSAGE = 16 * 2**20
"""Bytes of one message of the server."""
MAX_SHOWN = 300
"""Characters of a message that an error repeats, and of a reason that the model reads."""
UNFIT = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes with which a server refuses an action: the model wrote it."""


class Fields:
    """The view of an OpenEnv environment by the fields of its messages: actions and observations are JSON objects."""

    def __init__(
        self,
        environment: Any,
        *,
        action: str | None = None,
        fixed: Json | None = None,
        shows: str | None = None,
        ask: str = "",
        max_text: int = MAX_TEXT,
    ) -> None:
        """`action`: the field that a turn's words become, those in its last <answer> or <action> or all of them; None:
        the words are the action as a JSON object. `fixed`: fields of every action. `shows`: the field of an observation
        that is shown; None: all of it, as JSON. `ask`: written under every observation."""
        self._action, self._fixed, self._shows = action, dict(fixed or {}), shows
        self._ask, self._max_text = ask, max_text

    def show(self, observation: Any, info: Json) -> str:
        """The field, or all of the observation."""
        shown = observation if self._shows is None else observation.get(self._shows, "")
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        return "\n".join(filter(None, [text[: self._max_text], self._ask]))

    def action(self, text: str) -> Any:
        """The action's fields; None for no words, or for words that are no JSON object."""
        words = answered(text)
        if self._action is not None:
            return {**self._fixed, self._action: words} if words else None
        try:
            fields = json.loads(words)
        except (ValueError, RecursionError):
            return None
        return {**fields, **self._fixed} if isinstance(fields, dict) else None


class OpenEnv(StepEnvironment):
    """One session with an OpenEnv server. All rollouts of a prompt are reset with the same seed, as those of
    `slimx.extras.agents.hubs.gymnasium` are; `metadata.reset` of the prompt adds to what `reset` is given."""

    def __init__(
        self,
        *,
        url: str,
        text: str = FIELDS,
        text_options: Json | None = None,
        invalid_reward: float = 0.0,
        max_invalid: int = 3,
    ) -> None:
        """`url`: of the server. `text`: dotted path of a `slimx.extras.agents.hubs.views.View`, made with None and
        `text_options`. `invalid_reward`: for a turn without an action, or with one that the server refuses as unfit.
        `max_invalid`: such turns in a row, after which the rollout ends."""
        check_url(url, f"{KEY}.url", code="openenv.url")
        parts = urlsplit(url)
        self._url = urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/ws"))
        super().__init__(KEY, invalid_reward, max_invalid)
        self._view = imported(f"{KEY}.text", text)(None, **(text_options or {}))
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Prompt, seed: int) -> Begin:
        """Open the session and begin. Raises SlimxError for a server that is not there, or refuses."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), middlewares=[unredirected])
        try:
            self._socket = await self._http.ws_connect(self._url, max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"cannot be reached ({raised(error)})") from error
        given = {"seed": seed_of_prompt(prompt), **prompt.metadata.get("reset", {})}
        told = await self._ask({"type": "reset", "data": given})
        if isinstance(told, str):
            raise self._lost(f"refused to reset with {given}: {told}")
        self._look(told["observation"], told)
        return self._begun()

    async def step(self, text: str) -> Step:
        """Carry out the action of a turn. One without an action changes nothing, and says so."""
        action = self._view.action(text)
        if action is None:
            return self._refused()
        told = await self._ask({"type": "step", "data": action})
        if isinstance(told, str):
            return self._refused(told)
        reward = told.get("reward")
        if (gained := finite(0.0 if reward is None else reward)) is None:
            raise self._lost(f"gave the reward {reward!r}")
        self._look(told["observation"], told)
        return self._carried_out(gained, done=bool(told.get("done")))

    async def close(self) -> None:
        """End the session."""
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        except (aiohttp.ClientError, OSError):
            pass  # it has ended already
        finally:
            if self._http is not None:
                await self._http.close()

    async def _ask(self, message: Json) -> Json | str:
        """The data of the server's answer, or why it finds the message unfit. Its time is bounded by the rollout's
        `turn_deadline`. Raises SlimxError where the session has ended, or the environment has raised."""
        assert self._socket is not None
        try:
            await self._socket.send_json(message)
            came = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"has gone ({raised(error)})") from error
        if came.type is not aiohttp.WSMsgType.TEXT:
            raise self._lost(f"ended the session ({came.type.name}: {came.extra or came.data})")
        try:
            answer = json.loads(came.data)
            kind, data = answer["type"], answer["data"]
        except (ValueError, KeyError, TypeError):
            kind, data = None, None
        if kind == "error" and isinstance(data, dict):
            if data.get("code") in UNFIT:
                return str(data.get("errors") or data.get("message"))[:MAX_SHOWN]
            raise self._lost(f"answered {data.get('code')}: {str(data.get('message'))[:MAX_SHOWN]}")
        if kind != "observation" or not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
            raise self._lost(f"answered what is no observation: {came.data[:MAX_SHOWN]}")
        return data

    def _lost(self, what: str) -> SlimxError:
        return SlimxError(f"the OpenEnv server at {self._url} {what}", code="openenv.server", about=self._url)
