"""Resources servers of NeMo Gym: their tools over HTTP, their sessions, and their verdict as the reward.

rollout:
  prompts: resources_servers/example_session_state_mgmt/data/example.jsonl
  map: nemo_gym
  generate: tools
  options: {toolbox: nemo_gym, toolbox_options: {url: "http://127.0.0.1:8000"}}
reward: {function: tools}

The server runs in an environment of its own (`ng_run`); slimx needs nothing of the package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from slimx.data.records import Prompt
from slimx.data.whole import Json
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.toolbox import ToolResult, ToolsLost
from slimx.extras.http.answers import text_of

KEY = "rollout.options.toolbox_options"
ROW = "nemo_gym"
"""Key of a prompt's metadata under which its row is kept."""
OWN = frozenset({"seed_session", "verify", "aggregate_metrics"})
"""Paths of a resources server that are no tools."""
NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]+")
"""Names of tools: one segment of a path, which does not lead upwards."""
MAX_SHOWN = 300
"""Characters of an answer that an error repeats."""


def to_prompt(row: Json) -> Json:
    """The prompt of a row of NeMo Gym's data: for `rollout.map`. The row itself goes into the metadata, since its
    server wants it back. Raises SlimxError for a row without messages."""
    asked = row.get("responses_create_params")
    said = asked.get("input") if isinstance(asked, Mapping) else None
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(messages, list) or not messages:
        raise SlimxError(
            "a row of NeMo Gym has its messages in responses_create_params.input, and this one has none",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    turns = [{"role": _role(each), "content": _content(each)} for each in messages]
    if instructions := asked.get("instructions"):
        turns.insert(0, {"role": "system", "content": instructions})
    # Without an id: those of NeMo Gym's rows are not unique, and some files repeat whole rows.
    return {"messages": turns, "metadata": {ROW: row}}


class NemoGym:
    """The tools of one resources server, in a session of the rollout's own."""

    def __init__(self, *, url: str) -> None:
        """`url`: of the resources server, without a path behind it."""
        self._url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._row: Json = {}

    @classmethod
    def check(cls, *, url: str) -> None:
        """Refuse an address that is no URL (SlimxError)."""
        check_url(url, f"{KEY}.url", code="nemo_gym.url")

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Begin a session with the prompt's row; the tools are the row's. Raises ToolsLost, and SlimxError for a prompt
        without a row."""
        row = prompt.metadata.get(ROW)
        if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
            raise SlimxError(
                f"prompt {prompt.id!r} has no row of NeMo Gym in metadata.{ROW}; set rollout.map to "
                f"{__name__}.to_prompt",
                code="nemo_gym.row",
                about=prompt.id,
            )
        self._row = row
        # A session is a cookie, which servers on an address without a name set, too.
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout())
        status, text = await self._post("seed_session", row)
        if status != 200:
            raise self._lost("seed_session", f"answered {status}: {text[:MAX_SHOWN]}")
        return [_shown(tool) for tool in row["responses_create_params"].get("tools") or []]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """POST the arguments to the tool's path. An answer of another status than 200 is the model's to read, as NeMo
        Gym's own agent gives it; a server that cannot be reached is ToolsLost."""
        status, text = await self._post(name, arguments)
        return ToolResult(text=text, error=None if status == 200 else f"status_{status}")

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """The server's verdict: {"reward": ...}. Raises ToolsLost where it gives none."""
        status, text = await self._post("verify", self._row | {"response": self._response(messages)})
        try:
            reward = float(json.loads(text)["reward"]) if status == 200 else math.nan
        except (ValueError, KeyError, TypeError):
            reward = math.nan
        if not math.isfinite(reward):
            raise self._lost("verify", f"answered {status} without a reward: {text[:MAX_SHOWN]}")
        return {"reward": reward}

    async def close(self) -> None:
        """Forget the session; the server has no call for its end."""
        if self._http is not None:
            await self._http.close()

    async def _post(self, path: str, body: Json) -> tuple[int, str]:
        """Status and text of an answer; its time is bounded by the rollout. Raises ToolsLost."""
        assert self._http is not None
        try:
            async with self._http.post(f"{self._url}/{path}", json=body, allow_redirects=False) as answer:
                return answer.status, await text_of(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, raised(error)) from error

    def _lost(self, path: str, what: str) -> ToolsLost:
        return ToolsLost(f"the NeMo Gym server at {self._url}: /{path} {what}", about=self._url)

    def _response(self, messages: Sequence[Json]) -> Json:
        """The turns after the prompt as a response of OpenAI's API, which verifiers read."""
        output: list[Json] = []
        for number, message in enumerate(messages):
            if message["role"] == "user":  # inserted behind a call that could not be read: no part of a response
                continue
            if message["role"] == "tool":
                result = {"call_id": message["tool_call_id"], "output": message["content"]}
                output.append({"type": "function_call_output", **result})
                continue
            if message["content"] or not message.get("tool_calls"):
                text = {"type": "output_text", "text": message["content"] or "", "annotations": []}
                said = {"id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text]}
                output.append({"type": "message", **said})
            for call in message.get("tool_calls", []):
                asked = {"call_id": call["id"], "id": call["id"], "status": "completed", **call["function"]}
                output.append({"type": "function_call", **asked})
        asked_for = self._row["responses_create_params"]
        return {
            "id": "resp_slimx",
            "object": "response",
            "created_at": 0.0,
            "model": "policy",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": asked_for.get("tools") or [],
        }


def _shown(tool: Json) -> Json:
    """A tool of the responses API, as the chat template shows it. Raises SlimxError for a name that is no path."""
    name = str(tool.get("name"))
    if tool.get("type") != "function" or not NAME.fullmatch(name) or name in OWN:
        raise SlimxError(
            f"NeMo Gym: {name!r} of type {tool.get('type')!r} is no tool that a resources server carries out",
            code="nemo_gym.tool",
            about=name,
        )
    function = {"name": name, "description": tool.get("description") or "", "parameters": tool.get("parameters") or {}}
    return {"type": "function", "function": function}


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("system", "developer", "user", "assistant"):
        raise SlimxError(
            f"NeMo Gym: an item of responses_create_params.input has the role {role!r}; only turns of text begin a "
            "rollout here",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    return "system" if role == "developer" else role


def _content(message: Json) -> str:
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and "text" in part for part in parts):
        raise SlimxError(
            "NeMo Gym: an item of responses_create_params.input holds more than text, such as a picture",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    return "\n".join(str(part["text"]) for part in parts)
