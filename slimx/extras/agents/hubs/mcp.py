"""Tools of MCP servers (Model Context Protocol) over stdio or streamable HTTP, through the official Python SDK.

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
from typing import TYPE_CHECKING, Any

from slimx.data.records import Prompt
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.addresses import check_url
from slimx.extras.agents.hubs.mcp_bounds import Stderr, bounded_client
from slimx.extras.agents.hubs.mcp_stdio import started
from slimx.extras.agents.toolbox import ToolResult, ToolsLost
from slimx.json_types import Json
from slimx.runtime.process import guarded_argv

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, Tool

PACKAGE = "mcp==2.3.0"
KEY = "rollout.options.toolbox_options"
FIELDS = {"url": {"url", "headers", "headers_env"}, "command": {"command", "environment", "directory"}}
"""Valid keys of a server's configuration, by the key that selects its transport."""
CLOSE_S = 10.0
"""Deadline in seconds for closing one connection. If slimx started the server, this includes the server's exit, which
takes up to 3 * `slimx.extras.agents.hubs.mcp_stdio.END_S` seconds."""
MAX_PAGES = 100
"""Maximum number of pages of a server's tool list."""


class McpTools:
    """Toolbox with the tools of one or several MCP servers.

    A server with a `command` is started for each rollout and stopped at its end. A server with a `url` is already
    running, and each rollout has its own session with it.
    """

    def __init__(self, *, servers: Mapping[str, Json], tools: Sequence[str] | None = None) -> None:
        """Stores the configuration without connecting.

        `servers`: configuration of each server, by name. A server has either `url`, with the optional keys `headers`
        and `headers_env` (names of the environment variables with the headers' values), or `command`, with the optional
        keys `environment` (additional environment variables that the server inherits) and `directory` (its working
        directory). `tools`: names of the tools to use; None for all.
        """
        self._servers = {name: dict(server) for name, server in servers.items()}
        self._selected = tools
        self._connections: dict[str, _McpConnection] = {}
        self._by_tool: dict[str, _McpConnection] = {}

    @classmethod
    def check(cls, *, servers: Mapping[str, Json], tools: Sequence[str] | None = None) -> None:
        """Raises SlimxError for invalid options, without starting or contacting a server."""
        if not isinstance(servers, Mapping) or not servers:
            raise _refusal("no server is configured; add a server with a url or a command", "servers")
        if isinstance(tools, str):
            raise _refusal(f"{tools!r} is not a list; set [{tools}]", "tools")
        for name, server in servers.items():
            _check_server(name, server)
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise SlimxError(
                f"{KEY}.servers: MCP needs the package mcp, which cannot be imported ({raised(error)}); run `pip "
                f"install {PACKAGE}`",
                code="mcp.package",
                about=f"{KEY}.servers",
            ) from error

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Connects to all servers and returns their tools in the chat template's format.

        Raises ToolsLost if a server is unreachable, SlimxError if two servers have a tool of the same name or no server
        has a configured tool.
        """
        tools: list[Json] = []
        for name, server in self._servers.items():
            connection = _McpConnection(name, server)
            self._connections[name] = connection
            for tool in await connection.open():
                if self._selected is not None and tool.name not in self._selected:
                    continue
                if tool.name in self._by_tool:
                    raise SlimxError(
                        f"the MCP servers {self._by_tool[tool.name].name} and {name} both have a tool named "
                        f"{tool.name}; remove one of the two servers from {KEY}.servers",
                        code="mcp.twice",
                        about=tool.name,
                    )
                self._by_tool[tool.name] = connection
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                tools.append({"type": "function", "function": function})
        absent = [name for name in self._selected or () if name not in self._by_tool]
        if absent:
            known = ", ".join(self._by_tool) or "none"
            raise SlimxError(
                f"{KEY}.tools contains {absent[0]}, but the MCP servers have no tool of this name (available: "
                f"{known}); remove {absent[0]} from {KEY}.tools",
                code="mcp.tool",
                about=absent[0],
            )
        return tools

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Calls a tool and returns its result, which may be an error for the model to read.

        Raises ToolsLost if the server has died or cannot be reached.
        """
        return await self._by_tool[name].call(name, arguments)

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Returns {}, because MCP has no rewards."""
        return {}

    async def close(self) -> None:
        """Closes all sessions, and stops the servers that this toolbox started."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


class _McpConnection:
    """Connection to one server. A single asyncio task opens and closes it, as the SDK requires."""

    def __init__(self, name: str, server: Json) -> None:
        self.name = name
        self._server = server
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stderr: Stderr | None = None

    async def open(self) -> list[Tool]:
        """Connects and returns the server's tools. Raises ToolsLost if the server cannot be reached."""
        self._task = asyncio.create_task(self._keep(), name=f"slimx-mcp-{self.name}")
        try:
            client = await asyncio.shield(self._ready)
            tools: list[Tool] = []
            cursor = None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return tools
        except Exception as error:
            raise self._lost("does not list its tools", error) from error
        text = f"the MCP server {self.name} lists tools on more than {MAX_PAGES} pages; make it use fewer pages"
        raise ToolsLost(text, about=self.name)

    async def call(self, name: str, arguments: Json) -> ToolResult:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR

        client = self._ready.result()
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            # The SDK reports an unreachable server as INTERNAL_ERROR of the request.
            if error.code == CONNECTION_CLOSED or (error.code == INTERNAL_ERROR and not await self._lives()):
                raise self._lost("is gone", error) from error
            return ToolResult(text=f"Error: {error}", error="protocol")
        except Exception as error:
            if await self._lives():
                return ToolResult(
                    text=f"The response of the tool cannot be read: {raised(error)}"[:500], error="protocol"
                )
            raise self._lost("is gone", error) from error
        text, images, left_out = _parts(result)
        return ToolResult(text=text, error="tool" if result.is_error else None, left_out=left_out, images=images)

    async def close(self) -> None:
        """Closes the session, and stops the server if this connection started it."""
        self._stop.set()
        if self._task is not None:
            if not self._ready.done():  # still connecting
                self._task.cancel()
            done, _ = await asyncio.wait({self._task}, timeout=CLOSE_S)
            if not done:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=CLOSE_S)
        if self._ready.done():
            self._ready.exception()  # otherwise asyncio logs that the exception was never retrieved
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    async def _lives(self) -> bool:
        """Returns True if the server still responds to a request for its tools."""
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
            # The rollout bounds each call; a server that sends nothing for ten minutes counts as unreachable.
            http = await stack.enter_async_context(bounded_client(headers, 600.0))
            return streamable_http_client(server["url"], http_client=http)
        self._stderr = Stderr()
        variables = {name: os.environ[name] for name in server.get("environment") or ()}
        command = guarded_argv([str(word) for word in server["command"]])
        return started(command, variables, server.get("directory"), self._stderr)

    def _lost(self, state: str, error: Exception) -> ToolsLost:
        text = f"the MCP server {self.name} {state} ({raised(_leaf(error))})"
        if self._stderr is not None:
            if self._stderr.note:
                text += f"; {self._stderr.note}"
            output = self._stderr.text()
            if output:
                text += f"; it wrote: {output}"
        return ToolsLost(text, about=self.name)


def _parts(result: CallToolResult) -> tuple[str, list[str], int]:
    """Returns the text of a result, its images as data URIs, and the number of its other binary parts, such as audio,
    for which the text contains placeholders."""
    parts: list[str] = []
    images: list[str] = []
    left_out = 0
    for block in result.content:
        content = getattr(block, "resource", block)
        text = getattr(content, "text", None)
        if text is not None:
            parts.append(text)
        elif block.type == "resource_link":
            parts.append(f"({block.name}: {block.uri})")
        elif block.type == "image":
            images.append(f"data:{block.mime_type};base64,{block.data}")
        else:
            left_out += 1
            kind = getattr(content, "mime_type", None) or "unknown type"
            parts.append(f"({block.type} of {kind}, which cannot be shown)")
    if not (parts or images) and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts), images, left_out


def _leaf(error: BaseException) -> BaseException:
    """Returns the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_server(name: str, server: object) -> None:
    transports = [key for key in FIELDS if isinstance(server, Mapping) and key in server]
    if not isinstance(server, Mapping) or len(transports) != 1:
        raise _refusal("the server needs either url or command; set exactly one of them", f"servers.{name}")
    transport = transports[0]
    unknown = sorted(set(server) - FIELDS[transport])
    if unknown:
        keys = ", ".join(sorted(FIELDS[transport]))
        raise _refusal(
            f"the key is unknown; for a server with {transport}, use only {keys}", f"servers.{name}.{unknown[0]}"
        )
    if transport == "url":
        check_url(server["url"], f"{KEY}.servers.{name}.url", code="mcp.server")
    elif not isinstance(server["command"], Sequence) or isinstance(server["command"], str) or not server["command"]:
        raise _refusal("the command is not a nonempty list; write [PROGRAM, ARGUMENT, ...]", f"servers.{name}.command")
    elif shutil.which(str(server["command"][0])) is None:
        raise _refusal(
            f"the program {server['command'][0]} was not found; give its full path", f"servers.{name}.command"
        )
    variables = [*(server.get("headers_env") or {}).values(), *(server.get("environment") or ())]
    unset = [variable for variable in variables if variable not in os.environ]
    if unset:
        raise _refusal(f"the environment variable {unset[0]} is not set; export it for the run", f"servers.{name}")


def _refusal(reason: str, key: str) -> SlimxError:
    return SlimxError(f"{KEY}.{key}: {reason}", code="mcp.server", about=f"{KEY}.{key}")
