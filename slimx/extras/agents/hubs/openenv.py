"""Environments of OpenEnv: servers on which each rollout has a session over a WebSocket.

rollout:
  generate: multi_turn
  options:
    environment: openenv
    environment_options: {url: "http://127.0.0.1:8000", text_options: {action: message, shows: echoed_message}}

The server runs in a separate Python environment; slimx does not need the package.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from slimx.data.records import Prompt
from slimx.dotted import imported
from slimx.environments.base import Begin, Step
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.hubs.attempts import StepEnvironment, finite
from slimx.extras.agents.hubs.views import MAX_TEXT, answered, seed_of_prompt
from slimx.extras.http.responses import unredirected
from slimx.json_types import Json

KEY = "rollout.options.environment_options"
FIELDS = "slimx.extras.agents.hubs.openenv.Fields"
MAX_MESSAGE = 16 * 2**20
"""Maximum size of one message from the server, in bytes."""
MAX_SHOWN = 300
"""Maximum length in characters of a message that an error quotes, and of a refusal that the model reads."""
UNFIT = ("VALIDATION_ERROR", "INVALID_JSON")
"""Error codes with which a server refuses an invalid action of the model."""


class Fields:
    """View of an OpenEnv environment, which maps fields of its JSON actions and observations to text."""

    def __init__(
        self,
        environment: Any,
        *,
        action: str | None = None,
        fixed: Json | None = None,
        shows: str | None = None,
        image: str | None = None,
        ask: str = "",
        max_text: int = MAX_TEXT,
    ) -> None:
        """Stores the mapping between fields and text.

        `environment`: unused, because the environment is on a server. `action`: field of an action that receives the
        text of a turn (the last <answer> or <action> in it, or else all of it); None if that text is the whole action
        as a JSON object. `fixed`: fields and values that every action contains. `shows`: field of an observation that
        the model sees; None for the whole observation as JSON. A field of a nested object is written as a path, such as
        `arguments.message`; in `shows`, a path leads through all items of a list, and their texts become lines.
        `image`: field of an observation that contains an image, as a data URI or a PNG or JPEG file in base64; None if
        there is none. `ask`: text that is appended to every observation. `max_text`: maximum length of an observation's
        text in characters.
        """
        self._action = action
        self._fixed = dict(fixed or {})
        self._shows = shows
        self._image = image
        self._ask = ask
        self._max_text = max_text

    def show(self, observation: Any, info: Json) -> str:
        """Returns the configured field, or the whole observation, as text for the model."""
        shown: Any = {name: value for name, value in observation.items() if name != self._image}
        if self._shows is not None:
            shown = _found(observation, self._shows.split("."))
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        return "\n".join(filter(None, [text[: self._max_text], self._ask]))

    def images(self, observation: Any, info: Json) -> list[object]:
        """Returns the image in the configured field, if the observation has one."""
        found = None if self._image is None else observation.get(self._image)
        if not isinstance(found, str):
            return []
        return [found if found.startswith("data:") else f"data:;base64,{found}"]

    def action(self, text: str) -> Json | None:
        """Returns the action in a turn; None if the turn is empty, or must be a JSON object and is not."""
        words = answered(text)
        if self._action is not None:
            return _nested(self._fixed, self._action.split("."), words) if words else None
        try:
            fields = json.loads(words)
        except (ValueError, RecursionError):
            return None
        return {**fields, **self._fixed} if isinstance(fields, dict) else None


def _found(value: Any, path: list[str]) -> Any:
    """Returns the field at a path, "" if there is none. In a list, it is the text of all items, one line each."""
    if isinstance(value, list) and path:
        texts = [_found(item, path) for item in value]
        return "\n".join(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in texts)
    if not path:
        return value
    return _found(value.get(path[0], ""), path[1:]) if isinstance(value, dict) else ""


def _nested(fields: Json, path: list[str], value: str) -> Json:
    """Returns a copy of `fields` with `value` at a path."""
    name, *rest = path
    if not rest:
        return {**fields, name: value}
    inner = fields.get(name)
    return {**fields, name: _nested(inner if isinstance(inner, dict) else {}, rest, value)}


class OpenEnv(StepEnvironment):
    """One session with an OpenEnv server.

    All rollouts of a prompt are reset with the same seed: the prompt's `metadata.seed`, or else one derived from its
    id. `metadata.reset` of the prompt contains any additional arguments of `reset`.
    """

    def __init__(
        self,
        *,
        url: str,
        text: str = FIELDS,
        text_options: Json | None = None,
        invalid_reward: float = 0.0,
        max_invalid: int = 3,
    ) -> None:
        """Creates the view without connecting.

        `url`: base URL of the server. `text`: dotted path of a `slimx.extras.agents.hubs.views.View`, called with None
        and `text_options`. `invalid_reward`: reward of a turn without an action, or with an action that the server
        refuses. `max_invalid`: number of consecutive such turns after which the rollout ends.
        """
        check_url(url, f"{KEY}.url", code="openenv.url")
        parts = urlsplit(url)
        self._url = urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/ws"))
        super().__init__(KEY, invalid_reward, max_invalid)
        self._view = imported(f"{KEY}.text", text)(None, **(text_options or {}))
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Prompt, seed: int) -> Begin:
        """Opens the session and resets the environment.

        Raises SlimxError if the server cannot be reached or refuses the reset.
        """
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), middlewares=[unredirected])
        try:
            self._socket = await self._http.ws_connect(self._url, max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"cannot be reached ({raised(error)})") from error
        options = {"seed": seed_of_prompt(prompt), **prompt.metadata.get("reset", {})}
        data = await self._request({"type": "reset", "data": options})
        if isinstance(data, str):
            raise self._lost(f"refused to reset the environment with {options} ({data})")
        self._look(data["observation"], data)
        return self._beginning()

    async def step(self, text: str) -> Step:
        """Executes the action of the model's turn `text`. Without a valid action, nothing changes and a notice is
        returned."""
        action = self._view.action(text)
        if action is None:
            return self._refused()
        data = await self._request({"type": "step", "data": action})
        if isinstance(data, str):
            return self._refused(data)
        reward = data.get("reward")
        gained = finite(0.0 if reward is None else reward)
        if gained is None:
            raise self._lost(f"returned reward {reward!r}, which is not a finite number")
        self._look(data["observation"], data)
        return self._carried_out(gained, done=bool(data.get("done")))

    async def close(self) -> None:
        """Closes the session with the server."""
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        except (aiohttp.ClientError, OSError):
            pass  # the session is already closed
        finally:
            if self._http is not None:
                await self._http.close()

    async def _request(self, message: Json) -> Json | str:
        """Sends a message and returns the data of the response, or the reason why the server refuses the message.

        Sets no deadline, because `turn_deadline` bounds the step. Raises SlimxError if the session has ended or the
        environment failed.
        """
        assert self._socket is not None
        try:
            await self._socket.send_json(message)
            response = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"is gone ({raised(error)})") from error
        if response.type is not aiohttp.WSMsgType.TEXT:
            raise self._lost(f"closed the session ({response.type.name}: {response.extra or response.data})")
        kind = None
        data = None
        with suppress(ValueError, KeyError, TypeError):
            content = json.loads(response.data)
            data = content["data"]
            kind = content["type"]
        if kind == "error" and isinstance(data, dict):
            if data.get("code") in UNFIT:
                return str(data.get("errors") or data.get("message"))[:MAX_SHOWN]
            problem = f"answered with the error {data.get('code')} ({str(data.get('message'))[:MAX_SHOWN]})"
            if data.get("code") == "CAPACITY_REACHED":
                raise self._lost(problem, "set rollout.max_rollouts to the number of sessions that the server allows")
            raise self._lost(problem)
        if kind != "observation" or not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
            raise self._lost(f"answered with something other than an observation ({response.data[:MAX_SHOWN]})")
        return data

    def _lost(self, problem: str, remedy: str = "read the log of the OpenEnv server for the cause") -> SlimxError:
        return SlimxError(
            f"the OpenEnv server at {self._url} {problem}; {remedy}",
            code="openenv.server",
            about=self._url,
        )
