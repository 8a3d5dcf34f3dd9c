"""Tools of MCP servers (Model Context Protocol), over stdio or streamable HTTP, by the official SDK.

rollout:
  generate: tools
  options:
    toolbox: mcp
    toolbox_options:
      servers:
        search: {url: "http://127.0.0.1:8000/mcp", headers_env: {Authorization: SEARCH_TOKEN}}
        files: {command: [python, files_server.py], environment: [DATA_ROOT]}
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from slimx.data.records import Prompt
from slimx.data.whole import Json
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.hubs.mcp_bounds import Stderr, bounded_client
from slimx.extras.agents.hubs.mcp_stdio import started
from slimx.extras.agents.toolbox import ToolResult, ToolsLost
from slimx.runtime.process import guarded_argv

PACKAGE = "mcp==2.3.0"
KEY = "rollout.options.toolbox_options"
FIELDS = {"url": {"url", "headers", "headers_env"}, "command": {"command", "environment", "directory"}}
"""Keys of a server, by the one that says how it is reached."""
CLOSE_S = 10.0
"""Seconds for one connection to end; a server that was started has three times END_S to leave."""
MAX_PAGES = 100
"""Pages of a server's list of tools that are read."""


class McpTools:
    """The tools of one or several servers. A server with a `command` is started for each rollout and ends with it; one
    with a `url` runs already, and each rollout has a session of its own with it."""

    def __init__(self, *, servers: Mapping[str, Json], tools: Sequence[str] | None = None) -> None:
        """`servers`: by a name for errors, each with `url` (and `headers`, or `headers_env`, which names the variables
        that hold their values), or with `command` (and `environment`, names of variables that it gets besides those
        that start programs, and `directory`, in which it runs). `tools`: names of those that are shown; None: all."""
        self._servers, self._wanted = {name: dict(each) for name, each in servers.items()}, tools
        self._connections: dict[str, _Connection] = {}
        self._by_tool: dict[str, _Connection] = {}

    @classmethod
    def check(cls, *, servers: Mapping[str, Json], tools: Sequence[str] | None = None) -> None:
        """Refuse servers that cannot be asked (SlimxError); none is started or asked here."""
        if not isinstance(servers, Mapping) or not servers:
            raise _refusal("name at least one server, with its url or its command", "servers")
        if isinstance(tools, str):
            raise _refusal("give a list of names", "tools")
        for name, server in servers.items():
            _check_server(name, server)
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise SlimxError(
                f"{KEY}.servers: MCP needs the package mcp ({raised(error)}): pip install {PACKAGE}",
                code="mcp.package",
                about=f"{KEY}.servers",
            ) from error

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Connect to every server; their tools. Raises ToolsLost for one that is not there, SlimxError for a name that
        two have, or that none has."""
        shown: list[Json] = []
        for name, server in self._servers.items():
            connection = self._connections[name] = _Connection(name, server)
            for tool in await connection.open():
                if self._wanted is not None and tool.name not in self._wanted:
                    continue
                if tool.name in self._by_tool:
                    raise SlimxError(
                        f"the MCP servers {self._by_tool[tool.name].name} and {name} both have a tool {tool.name}; "
                        f"leave one of them out of {KEY}.servers",
                        code="mcp.twice",
                        about=tool.name,
                    )
                self._by_tool[tool.name] = connection
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                shown.append({"type": "function", "function": function})
        if absent := [name for name in self._wanted or () if name not in self._by_tool]:
            known = ", ".join(self._by_tool) or "none of these"
            raise SlimxError(
                f"{KEY}.tools: no server has a tool {absent[0]}; they have {known}",
                code="mcp.tool",
                about=absent[0],
            )
        return shown

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Call a tool. What it answers as an error is the model's to read; a server that has gone is ToolsLost."""
        return await self._by_tool[name].call(name, arguments)

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """MCP knows of no rewards."""
        return {}

    async def close(self) -> None:
        """End all sessions and processes."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


class _Connection:
    """One server. What the SDK opens has to be closed by the same task, so one task keeps it."""

    def __init__(self, name: str, server: Json) -> None:
        self.name, self._server = name, server
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stderr: Stderr | None = None

    async def open(self) -> list[Any]:
        """Connect; the server's tools. Raises ToolsLost."""
        self._task = asyncio.create_task(self._keep(), name=f"slimx-mcp-{self.name}")
        try:
            client = await asyncio.shield(self._ready)
            tools: list[Any] = []
            cursor = None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return tools
        except Exception as error:
            raise self._lost("cannot be asked for its tools", error) from error
        raise ToolsLost(f"the MCP server {self.name} lists tools on more than {MAX_PAGES} pages", about=self.name)

    async def call(self, name: str, arguments: Json) -> ToolResult:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR

        client = self._ready.result()
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            # The SDK reports a server that cannot be reached as an internal error of the request.
            if error.code == CONNECTION_CLOSED or (error.code == INTERNAL_ERROR and not await self._lives()):
                raise self._lost("has gone", error) from error
            return ToolResult(text=f"Error: {error}", error="protocol")
        except Exception as error:
            if await self._lives():
                return ToolResult(
                    text=f"The answer of the tool cannot be read: {raised(error)}"[:500], error="protocol"
                )
            raise self._lost("has gone", error) from error
        text, left_out = _text(result)
        return ToolResult(text=text, error="tool" if result.is_error else None, left_out=left_out)

    async def close(self) -> None:
        """End the session, and the process of a server that was started."""
        self._stop.set()
        if self._task is not None:
            if not self._ready.done():  # it is still connecting
                self._task.cancel()
            done, _ = await asyncio.wait({self._task}, timeout=CLOSE_S)
            if not done:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=CLOSE_S)
        if self._ready.done():
            self._ready.exception()  # read, so that asyncio does not tell of it
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    async def _lives(self) -> bool:
        """True if the server still lists its tools."""
        with suppress(Exception):
            async with asyncio.timeout(5.0):
                await self._ready.result().list_tools()
                return True
        return False

    async def _keep(self) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                self._ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error if isinstance(error, Exception) else ConnectionError(raised(error)))
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if "url" in server:
            headers = dict(server.get("headers") or {})
            headers |= {name: os.environ[variable] for name, variable in (server.get("headers_env") or {}).items()}
            # A call has the deadline of its rollout; a server that sends nothing for ten minutes has gone.
            http = await stack.enter_async_context(bounded_client(headers, 600.0))
            return streamable_http_client(server["url"], http_client=http)
        self._stderr = Stderr()
        named = {name: os.environ[name] for name in server.get("environment") or ()}
        command = guarded_argv([str(word) for word in server["command"]])
        return started(command, named, server.get("directory"), self._stderr)

    def _lost(self, what: str, error: Exception) -> ToolsLost:
        said = "" if self._stderr is None else self._stderr.text()
        wrote = f"; it wrote: {said}" if said else ""
        if self._stderr is not None and self._stderr.note:
            wrote = f"; {self._stderr.note}{wrote}"
        return ToolsLost(f"the MCP server {self.name} {what} ({raised(_leaf(error))}){wrote}", about=self.name)


def _text(result: Any) -> tuple[str, int]:
    """The text of a result, and how many parts of it are no text."""
    parts: list[str] = []
    left_out = 0
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) if resource is None else getattr(resource, "text", None)
        if text is not None:
            parts.append(text)
        elif block.type == "resource_link":
            parts.append(f"({block.name}: {block.uri})")
        else:
            left_out += 1
            kind = getattr(block if resource is None else resource, "mime_type", None) or "unknown type"
            parts.append(f"({block.type} of {kind}, which cannot be shown)")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts), left_out


def _leaf(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_server(name: str, server: Any) -> None:
    ways = [way for way in FIELDS if isinstance(server, Mapping) and way in server]
    if len(ways) != 1:
        raise _refusal("give either url or command", f"servers.{name}")
    if unknown := sorted(set(server) - FIELDS[ways[0]]):
        raise _refusal(
            f"a server with {ways[0]} has the keys {', '.join(sorted(FIELDS[ways[0]]))}", f"servers.{name}.{unknown[0]}"
        )
    if ways == ["url"]:
        check_url(server["url"], f"{KEY}.servers.{name}.url", code="mcp.server")
    elif not isinstance(server["command"], Sequence) or isinstance(server["command"], str) or not server["command"]:
        raise _refusal("give a list: a program and its arguments", f"servers.{name}.command")
    elif shutil.which(str(server["command"][0])) is None:
        raise _refusal(f"there is no program {server['command'][0]}; give its path", f"servers.{name}.command")
    variables = [*(server.get("headers_env") or {}).values(), *(server.get("environment") or ())]
    if unset := [variable for variable in variables if variable not in os.environ]:
        raise _refusal(f"{unset[0]} is not set; export it where the run is started", f"servers.{name}")


def _refusal(what: str, key: str) -> SlimxError:
    return SlimxError(f"{KEY}.{key}: {what}", code="mcp.server", about=f"{KEY}.{key}")
