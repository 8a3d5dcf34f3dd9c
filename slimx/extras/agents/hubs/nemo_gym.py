"""Resources servers of NeMo Gym: their tools and sessions over HTTP, and their verdict as the reward.

rollout:
  prompts: resources_servers/example_session_state_mgmt/data/example.jsonl
  map: nemo_gym
  generate: tools
  options: {toolbox: nemo_gym, toolbox_options: {url: "http://127.0.0.1:8000"}}
reward: {function: tools}

The server runs in a separate Python environment (`ng_run`); slimx does not need the package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

import aiohttp

from slimx.data.records import Prompt
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.toolbox import ToolResult, ToolsLost
from slimx.extras.http.responses import text_of
from slimx.json_types import Json

KEY = "rollout.options.toolbox_options"
ROW = "nemo_gym"
"""Key of the row in a prompt's metadata."""
RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics"})
"""Paths of a resources server that are not tools."""
NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]+")
"""Names of tools: one segment of a path, not . or .."""
MAX_SHOWN = 300
"""Maximum length of a quoted response in an error, in characters."""


def to_prompt(row: Json) -> Json:
    """Returns the prompt of a row of NeMo Gym's data. For `rollout.map`. The metadata keeps the whole row, because the
    server needs it for the verdict. Raises SlimxError for a row without messages."""
    parameters = row.get("responses_create_params")
    if not isinstance(parameters, Mapping):
        parameters = {}
    messages = parameters.get("input")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise SlimxError(
            "a row of NeMo Gym has its messages in responses_create_params.input, and this one has none",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    turns = [{"role": _role(message), "content": _content(message)} for message in messages]
    instructions = parameters.get("instructions")
    if instructions:
        turns.insert(0, {"role": "system", "content": instructions})
    # Without an id: ids of NeMo Gym's rows are not unique, and some files repeat whole rows.
    return {"messages": turns, "metadata": {ROW: row}}


class NemoGym:
    """The tools of one resources server, in the rollout's session."""

    def __init__(self, *, url: str) -> None:
        """Stores the base URL of the resources server."""
        self._url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._row: Json = {}

    @classmethod
    def check(cls, *, url: str) -> None:
        """Raises SlimxError for an invalid URL."""
        check_url(url, f"{KEY}.url", code="nemo_gym.url")

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Starts a session with the prompt's row and returns the tools of the row. Raises ToolsLost, and SlimxError for
        a prompt without a row."""
        row = prompt.metadata.get(ROW)
        if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
            raise SlimxError(
                f"prompt {prompt.id!r} has no row of NeMo Gym in metadata.{ROW}; set rollout.map to "
                f"{__name__}.to_prompt",
                code="nemo_gym.row",
                about=prompt.id,
            )
        self._row = row
        # A session is a cookie; unsafe: also from servers with an IP address instead of a name.
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout())
        status, text = await self._post("seed_session", row)
        if status != 200:
            raise self._lost("seed_session", f"answered {status}: {text[:MAX_SHOWN]}")
        return [_description(tool) for tool in row["responses_create_params"].get("tools") or []]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Posts the arguments to the tool's path. A status other than 200 is a result for the model, as with NeMo Gym's
        own agent. Raises ToolsLost for an unreachable server."""
        status, text = await self._post(name, arguments)
        return ToolResult(text=text, error=None if status == 200 else f"status_{status}")

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Returns the server's verdict: {"reward": ...}. Raises ToolsLost if there is none."""
        status, text = await self._post("verify", self._row | {"response": self._response(messages)})
        reward = math.nan
        if status == 200:
            with suppress(ValueError, KeyError, TypeError):
                reward = float(json.loads(text)["reward"])
        if not math.isfinite(reward):
            raise self._lost("verify", f"answered {status} without a reward: {text[:MAX_SHOWN]}")
        return {"reward": reward}

    async def close(self) -> None:
        """Forgets the session; the server has no request that ends it."""
        if self._http is not None:
            await self._http.close()

    async def _post(self, path: str, body: Json) -> tuple[int, str]:
        """Returns status and text of a response. The rollout bounds its time. Raises ToolsLost."""
        assert self._http is not None
        try:
            async with self._http.post(f"{self._url}/{path}", json=body, allow_redirects=False) as response:
                return response.status, await text_of(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, raised(error)) from error

    def _lost(self, path: str, problem: str) -> ToolsLost:
        return ToolsLost(f"the NeMo Gym server at {self._url}: /{path} {problem}", about=self._url)

    def _response(self, messages: Sequence[Json]) -> Json:
        """Converts the turns after the prompt to a response of OpenAI's API, which the server's verifiers read."""
        output: list[Json] = []
        for index, message in enumerate(messages):
            if message["role"] == "user":  # inserted after an unreadable call: not part of a response
                continue
            if message["role"] == "tool":
                result = {"call_id": message["tool_call_id"], "output": message["content"]}
                output.append({"type": "function_call_output", **result})
                continue
            if message["content"] or not message.get("tool_calls"):
                text: Json = {"type": "output_text", "text": message["content"] or "", "annotations": []}
                fields = {"id": f"msg_{index}", "role": "assistant", "status": "completed", "content": [text]}
                output.append({"type": "message", **fields})
            for call in message.get("tool_calls", []):
                fields = {"call_id": call["id"], "id": call["id"], "status": "completed", **call["function"]}
                output.append({"type": "function_call", **fields})
        parameters = self._row["responses_create_params"]
        return {
            "id": "resp_slimx",
            "object": "response",
            "created_at": 0.0,
            "model": "policy",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": parameters.get("tools") or [],
        }


def _description(tool: Json) -> Json:
    """Converts a tool of the responses API to the chat template's form. Raises SlimxError for a name that cannot be a
    path."""
    name = str(tool.get("name"))
    if tool.get("type") != "function" or not NAME.fullmatch(name) or name in RESERVED:
        raise SlimxError(
            f"NeMo Gym: {name!r} of type {tool.get('type')!r} is not a tool that a resources server carries out",
            code="nemo_gym.tool",
            about=name,
        )
    function = {"name": name, "description": tool.get("description") or "", "parameters": tool.get("parameters") or {}}
    return {"type": "function", "function": function}


def _role(message: object) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("system", "developer", "user", "assistant"):
        raise SlimxError(
            f"NeMo Gym: an item of responses_create_params.input has the role {role!r}; only text turns of system, "
            "developer, user and assistant are supported",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    return "system" if role == "developer" else role


def _content(message: Json) -> str:
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and "text" in part for part in parts):
        raise SlimxError(
            "NeMo Gym: an item of responses_create_params.input has non-text parts; only text is supported",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    return "\n".join(str(part["text"]) for part in parts)
