"""Environments of verifiers: the package's own runner and tools against the proxy, and servers that misbehave."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from aiohttp import web

from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt, Trajectory
from slimx.extras.agents import agent
from slimx.extras.agents.hubs import verifiers
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.http.responses import MAX_RESPONSE
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import Script, chat, client_of, context, trained
from tests.extras.agents.served import program, stand_in
from tests.extras.boxes.calls import calling
from tests.needed import hub_python
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of

PLAY = "verifiers"
URL = "rollout.options.agent_options.url"
SERVER = Path(verifiers.__file__).with_name("servers") / "verifiers_server.py"
TASK = Prompt(
    id="task-1",
    messages=[{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}],
    metadata={"verifiers": {"prompt": "1+1=", "system_prompt": "Add.", "answer": "2"}},
)


async def play(url: str, *says: str, prompt: Prompt = TASK, tokens: int = 4000, **options: str) -> list[Trajectory]:
    proxy = ChatProxy(context=tokens)
    try:
        ctx = context(Script(*says), proxy, max_new_tokens=400)
        return await agent.generate(ctx, prompt, agent=PLAY, agent_options={"url": url, **options})
    finally:
        await proxy.stop()


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    place = tmp_path / request.param
    place.mkdir()
    with program(hub_python("verifiers"), "verifiers_program.py", place / "log") as url:
        yield url


@pytest.mark.slow("needs build/hubs")
@pytest.mark.parametrize("server", ["verifiers_adding"], indirect=True)
async def test_its_tools_are_called_and_its_rubric_is_the_reward(server):
    right = play(server, f"So {calling('add', a=1, b=1)}", "It is 2.")
    wrong = play(server, "It is 3.")
    (found,), (other,) = await asyncio.gather(right, wrong)
    assert trained(found) == f"So {calling('add', a=1, b=1)}<end>It is 2.<end>"
    assert found.metadata["requests"] == 2 and found.metadata["result"]["metrics"] == {"answers": 2.0}
    assert await verifiers.reward(None, found) == {"right": 2.0, "by_tool": 1.0}
    assert await verifiers.reward(None, other) == {"right": 0.0, "by_tool": 0.0}


@pytest.mark.slow("needs build/hubs")
@pytest.mark.parametrize("server", ["verifiers_asking"], indirect=True)
async def test_an_environment_that_is_the_user_asks_again_in_the_same_trajectory(server):
    (found,) = await play(server, "2", "2")
    assert trained(found) == "2<end>2<end>" and found.metadata["result"]["turns"] == 2
    assert await verifiers.reward(None, found) == {"kept": 0.5}
    with pytest.raises(GivenUp) as caught:  # its answer is no task of this environment
        await play(server, "2", prompt=replace(TASK, metadata={"verifiers": {"prompt": "?"}}))
    assert caught.value.reason == "agent failed"


@pytest.mark.slow("needs build/hubs")
def test_its_tasks_are_a_file_of_prompts(tmp_path):
    env = json.dumps({"taskset": {"id": "verifiers_adding"}})
    command = [hub_python("verifiers"), str(SERVER), env, "--prompts", str(tmp_path / "p.jsonl"), "--tasks", "2"]
    subprocess.run(
        command, check=True, env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "", "HOME": str(tmp_path)}
    )
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert [prompt.id for prompt in prompts] == ["task-0", "task-1"] and prompts[1].messages == TASK.messages
    assert TASK.metadata["verifiers"].items() <= prompts[1].metadata["verifiers"].items()


def answering(status: int, body: Any, *, asks: int = 0) -> Any:
    """Returns a server that samples `asks` times, as an environment would, and then gives its verdict."""

    async def answer(request: web.Request) -> web.StreamResponse:
        episode = await request.json()
        answer.heard.append((request.path, episode["task"]))
        answer.token = request.headers.get("Authorization")
        async with client_of(episode["base_url"]) as client:
            messages = [{"role": "user", "content": episode["task"]["prompt"]}]
            for _ in range(asks):
                messages = [*messages, await chat(client, messages), {"role": "user", "content": "Sure?"}]
        if status == 0:
            await asyncio.Event().wait()
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers={"Location": "/elsewhere"})

    answer.heard = []
    return answer


GOOD = {"rewards": {"right": 2.0, "short": 0}, "metrics": {}, "turns": 2, "stop": "agent_completed"}


async def test_the_verdict_is_the_reward_of_what_was_sampled():
    server = answering(200, GOOD, asks=2)
    async with stand_in(server) as url:
        (found,) = await play(url, "It is 3.", "It is 2.")
    assert server.heard == [("/episode", TASK.metadata["verifiers"])]
    assert trained(found) == "It is 3.<end>It is 2.<end>"
    assert await verifiers.reward(None, found) == {"right": 2.0, "short": 0.0}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, {"error": "ToolsetError: gone"}, "ToolsetError: gone"),
        (200, {"rewards": {}}, "answered 200"),
        (200, {"rewards": {"right": float("nan")}}, "answered 200"),
        (200, {"rewards": {"right": "1"}}, "answered 200"),
        (200, [], "answered 200"),
        (200, "no JSON", "answered 200"),
        (400, {"error": "ValidationError: answer"}, "answered 400"),
        (500, GOOD, "answered 500"),
        (307, GOOD, "answered 307"),
        (200, "x" * (MAX_RESPONSE + 1), "more than"),
    ],
)
async def test_an_episode_without_a_verdict_is_counted_and_named(status, body, message):
    async with stand_in(answering(status, body, asks=1)) as url:
        with pytest.raises(GivenUp) as caught:
            await play(url, "It is 2.")
    assert caught.value.reason == "agent failed" and message in str(caught.value)


async def test_a_server_that_is_not_there_is_counted():
    with pytest.raises(GivenUp) as caught:
        await play("http://127.0.0.1:9")
    assert caught.value.reason == "agent failed"


async def test_a_server_that_hangs_is_left_at_the_deadline_of_its_rollout():
    async with stand_in(answering(0, "", asks=1)) as url:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await play(url, "It is 2.")


async def test_a_rollout_that_reached_a_limit_has_no_verdict_and_no_reward():
    async with stand_in(answering(200, {"error": "context"}, asks=3)) as url:
        (found,) = await play(url, "It is 3.", "It is 2.", tokens=60)
    assert found.status == "truncated" and await verifiers.reward(None, found) == 0.0


async def test_a_prompt_without_a_task_is_named():
    with pytest.raises(GivenUp) as caught:
        await play("http://127.0.0.1:9", prompt=Prompt(id="p7", messages=[{"role": "user", "content": "?"}]))
    cause = caught.value.__cause__
    assert (cause.code, cause.about) == ("verifiers.task", "p7")  # type: ignore[union-attr]


async def test_the_token_goes_along(monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "secret")
    server = answering(200, GOOD, asks=1)
    async with stand_in(server) as url:
        await play(url, "It is 2.", token_env="HUB_TOKEN")
        assert server.token == "Bearer secret"
    async with stand_in(server) as url:
        await play(url, "It is 2.")
        assert server.token is None


def test_a_token_that_is_not_there_is_refused_before_the_run(monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "")
    with refused("verifiers.token", about="rollout.options.agent_options.token_env"):
        options = {"agent": PLAY, "agent_options": {"url": "http://127.0.0.1:8000", "token_env": "HUB_TOKEN"}}
        load_hooks(config_of(generate="agent", options=options))


@pytest.fixture
def hub_server():
    """The server's module, which imports the package only with an environment."""
    spec = importlib.util.spec_from_file_location("hub_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Adding:
    """An environment in the form of verifiers' first interface: sums, asked once."""

    requires_group_rollouts = False

    def __init__(self, most: int = 3, groups: bool = False) -> None:
        self.most = most
        self.requires_group_rollouts = groups

    def get_dataset(self) -> list[dict[str, Any]]:
        system = {"role": "system", "content": "Add."}
        rows = [[system, {"role": "user", "content": f"{number}+1="}] for number in range(self.most)]
        return [{"prompt": row, "answer": str(number + 1), "example_id": number} for number, row in enumerate(rows)]

    async def run_rollout(
        self, row: dict[str, Any], client: Any, model: str, sampling: dict[str, Any], score: bool = True, **more: Any
    ) -> Any:
        if row["answer"] == "1":
            return {"error": {"error": "ModelError", "error_chain_str": "ModelError -> gone"}}
        if row["answer"] == "3":
            raise KeyError("no third sum")
        assert score and set(more) in (set(), {"gen_sem", "score_sem"})
        said = (await chat(client, row["prompt"])).model_dump()
        return {
            "reward": 0.5 * (said["content"] == row["answer"]),
            "metrics": {"right": 1.0},
            "completion": [said],
            "stop_condition": "max_turns_reached",
            "error": None,
        }


@pytest.fixture(params=["0.1", "0.3"])
def first_interface(monkeypatch, request):
    """Stand-ins for the modules of verifiers' first interface, which the tests' environment lacks."""
    types = SimpleNamespace(ClientConfig=SimpleNamespace)
    clients = SimpleNamespace(resolve_client=lambda config: client_of(config.api_base_url))
    if request.param == "0.1":
        clients = None
    package = SimpleNamespace(load_environment=lambda name, **options: {"adding": Adding}[name](**options))
    for name, module in (("", package), (".types", types), (".clients", clients)):
        monkeypatch.setitem(sys.modules, f"verifiers{name}", module)


async def test_an_environment_of_the_first_interface_is_played(hub_server, first_interface):
    env = hub_server.load({"load_environment": "adding"})
    failing, prompt, raising = (Prompt(**line) for line in env.prompts())
    assert prompt.messages == TASK.messages and prompt.id == "task-1"
    server = hub_server.EpisodeServer(env, 2)
    async with stand_in(server.episode) as url:
        (found,), (other,) = await asyncio.gather(play(url, "2", prompt=prompt), play(url, "3", prompt=prompt))
        with pytest.raises(GivenUp) as caught:
            await play(url, "1", prompt=failing)
        with pytest.raises(GivenUp) as raised:
            await play(url, "3", prompt=raising)
        with pytest.raises(GivenUp) as unknown:
            await play(url, "1", prompt=replace(prompt, metadata={"verifiers": {"answer": "1"}}))
    assert trained(found) == "2<end>" and await verifiers.reward(None, found) == {"reward": 0.5}
    assert await verifiers.reward(None, other) == {"reward": 0.0}
    assert found.metadata["result"]["turns"] == 1 and found.metadata["result"]["metrics"] == {"right": 1.0}
    assert "ModelError -> gone" in str(caught.value) and "no third sum" in str(raised.value)
    assert "answered 400" in str(unknown.value)


def test_an_environment_that_scores_groups_is_refused(hub_server, first_interface):
    with pytest.raises(SystemExit):
        hub_server.load({"load_environment": "adding", "args": {"groups": True}})


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--host", "0.0.0.0"], "add --token-env"), (["--host", "0.0.0.0", "--token-env", "HUB_TOKEN"], "is not set")],
)
def test_a_server_that_others_reach_does_not_start_without_a_token(hub_server, monkeypatch, capsys, words, message):
    monkeypatch.setenv("HUB_TOKEN", "")
    monkeypatch.setattr(sys, "argv", ["verifiers_server.py", "{}", *words])
    with pytest.raises(SystemExit):
        hub_server.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("authorization", "status"), [("", 401), ("Bearer wrong", 401), ("Bearer secret", 400)])
async def test_a_request_without_the_token_is_refused(hub_server, authorization, status):
    server = hub_server.EpisodeServer(MagicMock(), 1, "secret")
    request = MagicMock(headers={"Authorization": authorization}, json=AsyncMock(return_value={}))
    assert (await server.episode(request)).status == status


@pytest.mark.parametrize("url", ["localhost:8000", 8000])
def test_an_address_that_is_none_is_refused_before_the_run(url):
    with refused("verifiers.url", about=URL):
        options = {"agent": PLAY, "agent_options": {"url": url}}
        load_hooks(config_of(generate="agent", options=options))


def test_the_server_needs_nothing_that_its_environment_lacks():
    """Imports two modules of `slimx.extras.http` alone of slimx, which need nothing but aiohttp."""
    modules = ["slimx.extras.http.access", "slimx.extras.http.connections"]
    assert re.findall(r"(?:import|from) (slimx\S*)", SERVER.read_text()) == modules
    program = f"import sys, {', '.join(modules)}; print(*(n for n in sys.modules if n.startswith('slimx')))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["slimx", "slimx.extras", "slimx.extras.http", *modules]
