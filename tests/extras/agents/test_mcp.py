"""MCP servers as tools of a rollout: real servers of the official SDK, over stdio and over HTTP, good and bad."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.extras.agents import tools
from slimx.extras.agents.hubs.mcp import McpTools
from slimx.extras.agents.hubs.mcp_bounds import MAX_STDERR
from slimx.extras.agents.toolbox import ToolsLost
from slimx.extras.http.responses import MAX_RESPONSE
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import GivenUp, RewardContext, RolloutContext
from tests.extras.agents.proxy_stand import PROMPT, Script
from tests.extras.agents.served import program
from tests.extras.agents.tool_stand import context
from tests.extras.boxes.calls import calling
from tests.needed import need_package
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": [sys.executable, SERVER]}
BOX = "mcp"
KEY = "rollout.options.toolbox_options"


@pytest.fixture(autouse=True)
def _package() -> None:
    need_package("mcp")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of a server over HTTP."""
    need_package("mcp")
    with program(sys.executable, "mcp_server.py", tmp_path_factory.mktemp("mcp") / "log") as url:
        yield f"{url}/mcp"


def servers_left() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.status() != "zombie" and child.cmdline()[-1:] == [SERVER]]


async def play(server: dict[str, Any], *says: str, **options: Any) -> tuple[Trajectory, RolloutContext, Script]:
    ctx, script = context(*says)
    arguments = {"servers": {"test": server}} | options.pop("toolbox_options", {})
    trajectory = await tools.generate(ctx, PROMPT, toolbox=BOX, toolbox_options=arguments, **options)
    return trajectory, ctx, script


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_tools_are_shown_called_and_their_results_read(kind, url):
    trajectory, ctx, script = await play(
        STDIO if kind == "stdio" else {"url": url},
        f"Let me see. {calling('add', a=12, b=34)}",
        calling("fail") + calling("draw"),
        "46",
    )
    shown = json.loads(script.received[0][0].partition("[tools ")[2].partition("]<user>")[0])
    add = next(tool["function"] for tool in shown if tool["function"]["name"] == "add")
    assert add["description"] == "Add two numbers." and set(add["parameters"]["properties"]) == {"a", "b"}
    first, second = (after.rpartition("<end>\n<assistant>")[0] for after, _, _ in script.received[1:])
    assert first.endswith("<user>tool: 46")
    result = second.partition("fail")[2]
    assert "<user>tool: Error executing tool fail" in result
    assert f"<user>tool: A dot:\n{tools.UNSEEN}" in result
    assert trajectory.metadata == {
        "ended": "done",
        "turns": 3,
        "tool_calls": 3,
        "tool_errors": {"tool": 1},
        "judged": {},
    }
    assert ctx.metrics == {"tool_calls": 3.0, "tool_errors": 1.0, "unreadable_calls": 0.0, "left_out": 1.0}
    sampled = [token for completion in script.completions for token in completion.token_ids.tolist()]
    assert trajectory.token_ids[trajectory.loss_mask == 1].tolist() == sampled and trajectory.spans[-1].turn == 2
    assert not servers_left()


async def test_a_started_server_belongs_to_its_rollout_alone(url):
    says = (calling("keep", name="n"), calling("keep", name="n"), "done")
    both = await asyncio.gather(*(play(STDIO, *says) for _ in range(2)))
    assert ["n 2" in script.received[2][0] and "n 3" not in script.received[2][0] for _, _, script in both] == [
        True,
        True,
    ]


async def test_tools_of_several_servers_and_a_choice_of_them(url):
    arguments = {"servers": {"one": STDIO, "two": {"url": url}}}
    box = McpTools(**arguments)
    try:
        with pytest.raises(SlimxError) as caught:
            await box.open(PROMPT, 0)
        assert caught.value.code == "mcp.twice"
    finally:
        await box.close()
    box = McpTools(servers={"two": {"url": url}}, tools=["add"])
    try:
        assert [tool["function"]["name"] for tool in await box.open(PROMPT, 0)] == ["add"]
    finally:
        await box.close()
    box = McpTools(servers={"two": {"url": url}}, tools=["add", "subtract"])
    try:
        with pytest.raises(SlimxError) as caught:
            await box.open(PROMPT, 0)
        assert (caught.value.code, caught.value.about) == ("mcp.tool", "subtract")
    finally:
        await box.close()


async def test_a_server_gets_the_variables_and_headers_that_are_named(url, monkeypatch):
    monkeypatch.setenv("TOOL_SECRET", "one")
    monkeypatch.setenv("OTHER_SECRET", "two")
    says = (calling("secret"), "done")
    _, _, script = await play({**STDIO, "environment": ["TOOL_SECRET"]}, *says)
    assert "tool: one none none" in script.received[1][0]
    _, _, script = await play({"url": url, "headers_env": {"x-secret": "OTHER_SECRET"}}, *says)
    assert "tool: none none two" in script.received[1][0]


async def test_invalid_tool_calls_are_explained_and_counted(url):
    trajectory, ctx, script = await play(
        {"url": url},
        calling("subtract"),
        calling("add", a="many"),
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b"',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        calling("add", a=1, b=1),
        "<tool_call>",
        "46",
    )
    assert trajectory.metadata["tool_errors"] == {"tool": 1, "unknown_tool": 1}
    assert ctx.metrics == {"tool_calls": 3.0, "tool_errors": 2.0, "unreadable_calls": 3.0, "left_out": 0.0}
    assert "There is no tool subtract" in script.received[1][0] and trajectory.metadata["ended"] == "done"
    assert script.received[4][0].count(tools.UNREADABLE) == 2


@pytest.mark.parametrize(
    ("ended", "options", "turns"),
    [
        ("turns", {"max_turns": 4}, 4),
        ("calls", {"max_calls": 2}, 3),
        ("context", {"max_context": 3000}, 1),
        ("unreadable", {"max_unreadable": 2}, 2),
    ],
)
async def test_an_agent_that_never_ends_is_ended(url, ended, options, turns):
    answers = {"unreadable": "<tool_call>{", "context": calling("write", characters=4000)}
    says = [answers.get(ended, calling("keep", name="again"))] * 40
    trajectory, _, script = await play({"url": url}, *says, **options)
    assert trajectory.metadata["ended"] == ended
    assert trajectory.metadata["turns"] == len(script.received) == turns
    assert len(trajectory.token_ids) <= options.get("max_context", 10**6)


async def test_a_cut_off_turn_ends_the_rollout(url):
    ctx, _ = context("x" * 100, max_new_tokens=20)
    arguments = {"servers": {"test": {"url": url}}}
    trajectory = await tools.generate(ctx, PROMPT, toolbox=BOX, toolbox_options=arguments)
    assert (trajectory.metadata["ended"], trajectory.status) == ("length", "truncated")


async def test_a_long_result_is_cut_and_says_so(url):
    _, _, script = await play({"url": url}, calling("write", characters=5000), "ok", max_result=100)
    result = script.received[1][0].rpartition("tool: ")[2]
    assert result.startswith("x" * 100 + "\n(4900 characters left out)")


@pytest.mark.parametrize("kind", [pytest.param("stdio", marks=pytest.mark.slow("both kinds of servers")), "http"])
async def test_the_second_call_beyond_its_deadline_ends_the_rollout(kind, url):
    server = STDIO if kind == "stdio" else {"url": url}
    late = calling("hang")
    trajectory, ctx, script = await play(server, late, calling("add", a=1, b=1), "2", call_deadline=10.0)
    assert trajectory.metadata["tool_errors"] == {"deadline": 1} and script.received[2][0].count("tool: 2<end>") == 1
    with pytest.raises(GivenUp) as caught:
        await play(server, late, late, "2", call_deadline=0.5)
    assert caught.value.reason == "tools deadline" and not servers_left()


async def test_a_server_that_stops_answering_costs_its_rollout_alone():
    with pytest.raises(GivenUp) as caught:
        await play(STDIO, calling("stop_answering"), calling("add", a=1, b=1), call_deadline=0.5)
    assert caught.value.reason == "tools deadline" and not servers_left()


async def test_a_server_that_dies_is_named_with_its_last_words():
    with pytest.raises(GivenUp) as caught:
        await play(STDIO, calling("die"), "2")
    assert caught.value.reason == "tools lost" and "out of paper" in str(caught.value) and not servers_left()


async def test_an_answer_over_http_that_is_too_long_is_not_read(url):
    trajectory, _, script = await play({"url": url}, calling("write", characters=2**20), "2", max_result=10)
    assert trajectory.metadata["tool_errors"] == {} and "tool: xxx" in script.received[1][0]
    with pytest.raises(GivenUp) as caught:
        await play({"url": url}, calling("write", characters=MAX_RESPONSE + 1), calling("add", a=1, b=1), "2")
    assert caught.value.reason == "tools lost"


async def test_a_started_server_that_answers_too_much_is_lost_at_once():
    with pytest.raises(GivenUp) as caught:
        await play(STDIO, calling("write", characters=MAX_RESPONSE + 1), "2", call_deadline=600.0)
    assert caught.value.reason == "tools lost" and str(MAX_RESPONSE) in str(caught.value) and not servers_left()


async def test_only_the_end_of_a_servers_standard_error_is_kept():
    with pytest.raises(GivenUp) as caught:
        await play(STDIO, calling("complain", characters=5 * 2**20), calling("die"), "2")
    message = str(caught.value)
    assert "out of paper" in message and MAX_STDERR // 2 < len(message) < 2 * MAX_STDERR and not servers_left()


async def test_a_server_over_http_that_dies_is_lost(tmp_path):
    with program(sys.executable, "mcp_server.py", tmp_path / "log") as url:
        with pytest.raises(GivenUp) as caught:
            await play({"url": f"{url}/mcp"}, calling("add", a=1, b=1), calling("die"), "2", call_deadline=20.0)
        assert caught.value.reason == "tools lost"


@pytest.mark.parametrize(
    ("server", "deadline", "reason"),
    [
        ({"url": "http://127.0.0.1:9/mcp"}, 300.0, "tools lost"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no licence')"]}, 300.0, "tools lost"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, 300.0, "tools lost"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(600)"]}, 4.0, "tools deadline"),
    ],
)
async def test_a_server_that_does_not_come_is_named_in_time(server, deadline, reason):
    began = time.monotonic()
    with pytest.raises(GivenUp) as caught:
        await play(server, "2", open_deadline=deadline)
    assert caught.value.reason == reason and time.monotonic() - began < 200
    left = psutil.Process().children(recursive=True)
    assert not [
        process
        for process in left
        if process.status() != "zombie" and process.cmdline()[-1:] == server.get("command", [0])[-1:]
    ]


async def test_a_rollout_that_is_cancelled_leaves_no_server():
    ctx, script = context(calling("hang"), "2")
    task = asyncio.create_task(
        tools.generate(ctx, PROMPT, toolbox=BOX, toolbox_options={"servers": {"test": STDIO}}, call_deadline=500.0)
    )
    while not script.completions:
        await asyncio.sleep(0.05)
    assert servers_left()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not servers_left()


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({"toolbox": f"{BOX}s"}, "dotted.name", "rollout.options.toolbox"),
        ({"toolbox": "slimx.extras.boxes.programs.python_tool.PythonTool"}, "tools.methods", "rollout.options.toolbox"),
        ({"toolbox_options": {}}, "tools.option", "rollout.options.toolbox_options"),
        ({"toolbox_options": {"servers": {}}}, "mcp.server", f"{KEY}.servers"),
        ({"toolbox_options": {"servers": {"a": {}}}}, "mcp.server", f"{KEY}.servers.a"),
        ({"toolbox_options": {"servers": {"a": STDIO | {"url": "http://h/"}}}}, "mcp.server", f"{KEY}.servers.a"),
        ({"toolbox_options": {"servers": {"a": STDIO | {"headers": {}}}}}, "mcp.server", f"{KEY}.servers.a.headers"),
        ({"toolbox_options": {"servers": {"a": {"url": "h:8000/mcp"}}}}, "mcp.server", f"{KEY}.servers.a.url"),
        ({"toolbox_options": {"servers": {"a": {"command": "python"}}}}, "mcp.server", f"{KEY}.servers.a.command"),
        ({"toolbox_options": {"servers": {"a": {"command": ["no-such"]}}}}, "mcp.server", f"{KEY}.servers.a.command"),
        ({"toolbox_options": {"servers": {"a": STDIO | {"environment": ["NOPE"]}}}}, "mcp.server", f"{KEY}.servers.a"),
        ({"toolbox_options": {"servers": {"a": STDIO}, "tools": "add"}}, "mcp.server", f"{KEY}.tools"),
        ({"tool_parser": "nobody"}, "proxy.tool_parser", "rollout.options.tool_parser"),
        ({"max_calls": 0}, "tools.limit", "rollout.options.max_calls"),
        ({"call_deadline": "1m"}, "tools.limit", "rollout.options.call_deadline"),
        ({"max_turn": 3}, "dotted.options", "rollout.options"),
    ],
)
def test_tools_that_cannot_work_are_refused_before_the_run(options, code, about):
    hook_options = {"toolbox": BOX, "toolbox_options": {"servers": {"a": STDIO}}} | options
    with refused(code, about=about):
        load_hooks(config_of(generate="tools", options=hook_options))


def test_a_missing_package_is_refused_with_its_pinned_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with refused("mcp.package", about=f"{KEY}.servers"):
        McpTools.check(servers={"a": STDIO})


async def test_a_run_without_tool_rewards_is_told_to_set_a_reward_function(url):
    trajectory, *_ = await play({"url": url}, "2")
    with refused("tools.reward", about="reward.function"):
        await tools.reward(RewardContext(PROMPT, None, "", False), trajectory)


async def test_a_toolbox_that_was_never_opened_can_be_closed():
    box = McpTools(servers={"a": STDIO})
    await box.close()
    with pytest.raises(ToolsLost):
        box = McpTools(servers={"a": {"command": [sys.executable, "-c", ""]}})
        try:
            await box.open(Prompt(id="p", token_ids=[1]), 0)
        finally:
            await box.close()
    assert not servers_left()
