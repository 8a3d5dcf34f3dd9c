"""A server of tools for tests, written with the official SDK: over stdio, or over streamable HTTP at a given port.

python mcp_server.py [PORT]
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("tools of a test")
kept: Counter[str] = Counter()


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def keep(name: str) -> str:
    """Count a name in this process."""
    kept[name] += 1
    return f"{name} {kept[name]}"


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("there is no such page")


@server.tool()
async def hang(seconds: float = 600.0) -> str:
    """Answer late."""
    import anyio

    await anyio.sleep(seconds)
    return "late"


@server.tool()
async def stop_answering() -> str:
    """Hold the whole server up."""
    time.sleep(600)
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    print("out of paper", file=sys.stderr, flush=True)
    os._exit(7)


@server.tool()
def draw() -> list:
    """Draw a picture."""
    return ["A dot:", Image(data=b"\x89PNG", format="png")]


@server.tool()
def write(characters: int) -> str:
    """Write much."""
    return "x" * characters


@server.tool()
def complain(characters: int) -> int:
    """Write much to standard error, and as many bytes as it was let write."""
    return sys.stderr.write("x" * characters)


@server.tool()
def secret(context: Context) -> str:
    """The variables and headers that this server was started or asked with."""
    request = context.request_context.request
    sent = request.headers.get("x-secret", "none") if request is not None else "none"
    return f"{os.environ.get('TOOL_SECRET', 'none')} {os.environ.get('OTHER_SECRET', 'none')} {sent}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
