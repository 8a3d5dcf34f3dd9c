"""Toolbox for resources servers of NeMo Gym: their tools and sessions over HTTP, and their verification as the reward.

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
"""Key in a prompt's metadata under which the row of NeMo Gym's data is stored."""
RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics"})
"""Paths of a resources server that are not tools."""
NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]+")
"""Pattern of valid tool names: one segment of a URL path, other than "." and ".."."""
MAX_SHOWN = 300
"""Maximum length of a response that an error message quotes, in characters."""


def to_prompt(row: Json) -> Json:
    """Converts a row of NeMo Gym's data to a prompt, for `rollout.map`.

    The metadata contains the whole row, because the server needs it to verify the rollout. Raises SlimxError for a row
    without messages.
    """
    parameters = row.get("responses_create_params")
    if not isinstance(parameters, Mapping):
        parameters = {}
    messages = parameters.get("input")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise SlimxError(
            f"responses_create_params.input of a NeMo Gym row is {str(messages)[:80]!r}, which is neither text nor a "
            "nonempty list; set responses_create_params.input to a list of the prompt's messages",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    turns = [{"role": _role(message), "content": _content(message)} for message in messages]
    instructions = parameters.get("instructions")
    if instructions:
        turns.insert(0, {"role": "system", "content": instructions})
    # The prompt has no id, because NeMo Gym's row ids are not unique and some files repeat whole rows.
    return {"messages": turns, "metadata": {ROW: row}}


class ResourcesServer:
    """One session with a resources server over HTTP, which a cookie identifies."""

    def __init__(self, *, url: str) -> None:
        """Stores the base URL of the resources server."""
        self._url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._row: Json = {}

    def _begin(self, prompt: Prompt) -> None:
        """Stores the prompt's row and opens the HTTP session. Raises SlimxError for a prompt without a row."""
        row = prompt.metadata.get(ROW)
        if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
            raise SlimxError(
                f"prompt {prompt.id!r} has no NeMo Gym row in metadata.{ROW}; set rollout.map to {__name__}.to_prompt",
                code="nemo_gym.row",
                about=prompt.id,
            )
        self._row = row
        # unsafe=True accepts cookies of servers that are addressed by IP.
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout())

    async def close(self) -> None:
        """Closes the HTTP session; the session on the server remains."""
        if self._http is not None:
            await self._http.close()

    async def _post(self, path: str, body: Json) -> tuple[int, str]:
        """Sends a POST request and returns the response's status and text. Sets no deadline, because the rollout's
        deadline applies. Raises ToolsLost for an unreachable server."""
        assert self._http is not None
        try:
            async with self._http.post(f"{self._url}/{path}", json=body, allow_redirects=False) as response:
                return response.status, await text_of(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, f"cannot be reached ({raised(error)})") from error

    def _lost(self, path: str, problem: str) -> ToolsLost:
        text = f"the NeMo Gym server at {self._url}: /{path} {problem}; read the server's log for the cause"
        return ToolsLost(text, about=self._url)


class NemoGym(ResourcesServer):
    """Toolbox with the tools of one NeMo Gym resources server. Each rollout uses them in a separate session."""

    @classmethod
    def check(cls, *, url: str) -> None:
        """Raises SlimxError for an invalid URL."""
        check_url(url, f"{KEY}.url", code="nemo_gym.url")

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Starts a session with the prompt's row and returns the tools that the row names.

        Raises ToolsLost if the server fails or cannot be reached, SlimxError for a prompt without a row.
        """
        self._begin(prompt)
        row = self._row
        status, text = await self._post("seed_session", row)
        if status != 200:
            raise self._lost("seed_session", f"answered {status} ({text[:MAX_SHOWN]})")
        return [_description(tool) for tool in row["responses_create_params"].get("tools") or []]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Calls a tool by posting `arguments` to its path.

        A response with a status other than 200 is returned to the model as the tool's result, as in NeMo Gym's own
        agent. Raises ToolsLost if the server is unreachable.
        """
        status, text = await self._post(name, arguments)
        return ToolResult(text=text, error=None if status == 200 else f"status_{status}")

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Returns the server's reward as {"reward": ...}. Raises ToolsLost if the server returns none."""
        status, text = await self._post("verify", self._row | {"response": response_of(messages, self._row)})
        reward = math.nan
        if status == 200:
            with suppress(ValueError, KeyError, TypeError):
                reward = float(json.loads(text)["reward"])
        if not math.isfinite(reward):
            raise self._lost("verify", f"answered {status} without a finite reward ({text[:MAX_SHOWN]})")
        return {"reward": reward}


def response_of(messages: Sequence[Json], row: Json) -> Json:
    """Converts turns after the prompt of `row` to a response in the format of OpenAI's Responses API, which servers
    expect."""
    output: list[Json] = []
    for index, message in enumerate(messages):
        if message["role"] == "user":  # inserted after an unreadable call, and not part of the response
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
    parameters = row["responses_create_params"]
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
    """Converts a tool from the format of OpenAI's Responses API to the chat template's. Raises SlimxError for a tool
    that is not a function, or whose name cannot be a URL path."""
    name = str(tool.get("name"))
    if tool.get("type") != "function" or not NAME.fullmatch(name) or name in RESERVED:
        is_function = tool.get("type") == "function"
        problem = (
            "has a name that is not the path of a tool on the resources server"
            if is_function
            else f"has the type {tool.get('type')!r}, not function"
        )
        raise SlimxError(
            f"NeMo Gym: tool {name!r} {problem}; remove tool {name!r} from responses_create_params.tools of the row",
            code="nemo_gym.tool",
            about=name,
        )
    function = {"name": name, "description": tool.get("description") or "", "parameters": tool.get("parameters") or {}}
    return {"type": "function", "function": function}


def _role(message: object) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("system", "developer", "user", "assistant"):
        raise SlimxError(
            f"NeMo Gym: an item of responses_create_params.input has the role {role!r}, which is not supported; use "
            "only items with the role system, developer, user or assistant",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    return "system" if role == "developer" else role


def _content(message: Json) -> str:
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and "text" in part for part in parts):
        raise SlimxError(
            f"NeMo Gym: an item of responses_create_params.input has the content {str(content)[:80]!r}, which is not "
            "text; use only items with text content",
            code="nemo_gym.row",
            about="responses_create_params.input",
        )
    return "\n".join(str(part["text"]) for part in parts)
