"""Environments of OpenEnv over their WebSocket: a real server's sessions, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from slimx.data.records import Prompt
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.agents import multi_turn
from slimx.extras.agents.hubs.openenv import Fields, OpenEnv
from slimx.rollout.hook_loading import load_hooks
from tests.extras.agents.served import program, stand_in
from tests.needed import hub_python
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of
from tests.unit.rollout.scripted_engine import ScriptedEngine, context, spans

PATH = "openenv"
KEY = "rollout.options.environment_options"
NUMBER = random.Random(5).randrange(10)
"""The number that the real server's environment draws with seed 5."""
PROMPT = Prompt(id="guess", messages=[{"role": "user", "content": "Which?"}], metadata={"seed": 5})
BEGUN = {"type": "observation", "data": {"observation": {"hint": "Go."}, "reward": None, "done": False}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("openenv") / "log"
    with program(hub_python("openenv-core"), "openenv_server.py", log) as url:
        yield url


async def play(url: str, *says: str, prompt: Prompt = PROMPT, **options: Any) -> Any:
    ctx = context(ScriptedEngine(*says))
    text = {"text_options": {"action": "guess", "shows": "hint"}}
    trajectory = await multi_turn.generate(
        ctx,
        prompt,
        environment=PATH,
        environment_options={"url": url} | text | options.pop("environment_options", {}),
        max_turns=len(says),
        **options,
    )
    return ctx, trajectory


@pytest.mark.slow("needs build/hubs")
async def test_a_session_is_played_to_its_end(server):
    wrong = 9 if NUMBER < 9 else 0
    ctx, trajectory = await play(server, f"<answer>{wrong}</answer>", "perhaps", str(NUMBER), str(NUMBER))
    observations = [text for source, _, text in spans(trajectory) if source == "inserted"]
    assert (
        "From 0 to 9." in observations[0]
        and ("Less." if wrong else "More.") in observations[1]
        and "no action" in observations[2]
    )
    assert trajectory.metadata["rewards"] == [0.0, 0.0, 1.0] and trajectory.metadata["ended"] == "done"
    assert ctx.metrics == {"tool_calls": 0.0, "invalid_actions": 1.0}
    keys = [turn.state_key for turn in trajectory.turns]
    assert keys[1] == keys[2] != keys[0]


@pytest.mark.slow("needs build/hubs")
async def test_rollouts_of_a_prompt_start_alike_in_separate_sessions(server):
    prompt = Prompt(id="p", messages=PROMPT.messages, metadata={"seed": 5, "reset": {"least": 3}})
    wrong = str(9 if NUMBER < 9 else 0)
    both = await asyncio.gather(*(play(server, wrong, wrong, prompt=prompt) for _ in range(2)))
    first, second = ([turn.state_key for turn in trajectory.turns] for _, trajectory in both)
    assert first == second and len(set(first)) == 2, "tries are counted in the observation"
    assert all("From 3 to 9." in spans(trajectory)[1][2] for _, trajectory in both)


@pytest.mark.slow("needs build/hubs")
async def test_an_environment_that_raises_and_a_server_that_ends_are_named(server, tmp_path):
    with pytest.raises(SlimxError) as caught:
        await play(server, "13")
    assert caught.value.code == "openenv.server" and "not this one" in str(caught.value)
    worlds = [OpenEnv(url=server) for _ in range(4)]
    try:
        with pytest.raises(SlimxError) as caught:
            for world in worlds:
                await world.reset(PROMPT, 0)
        assert caught.value.code == "openenv.server", "it has three places"
    finally:
        for world in worlds:
            await world.close()
    with program(hub_python("openenv-core"), "openenv_server.py", tmp_path / "log") as url:
        with pytest.raises(SlimxError) as caught:
            await play(url, "99")
        assert caught.value.code == "openenv.server"


def speaking(*answers: Any) -> Any:
    """Returns a server that answers a session's messages with these, in turn, and then not at all."""

    async def speak(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            await socket.receive()
            if answer is None:
                await socket.close()
                return socket
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        while not (await socket.receive()).type.name.startswith("CLOS"):
            pass
        return socket

    return speak


def observed(**data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"hint": "x"}, "reward": 1, "done": False} | data}


def error(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": "no", "errors": [{"msg": "an integer"}]}}


@pytest.mark.parametrize(
    "answers",
    [
        (None,),
        ("hello",),
        ("[1]",),
        ({"type": "state", "data": {}},),
        (error("CAPACITY_REACHED"),),
        (error("VALIDATION_ERROR"),),
        (BEGUN, None),
        (BEGUN, error("EXECUTION_ERROR")),
        (BEGUN, observed(reward="much")),
        (BEGUN, '{"type": "observation", "data": {"observation": {}, "reward": NaN}}'),
        (BEGUN, observed(observation=None)),
    ],
)
async def test_a_server_that_answers_wrongly_is_named(answers):
    async with stand_in(speaking(*answers)) as url:
        with pytest.raises(SlimxError) as caught:
            await play(url, "1")
        assert (caught.value.code, caught.value.about) == ("openenv.server", f"{url}/ws")


async def test_a_full_server_is_answered_with_the_setting_that_helps():
    async with stand_in(speaking(error("CAPACITY_REACHED"))) as url:
        with pytest.raises(SlimxError) as caught:
            await play(url, "1")
    assert "rollout.max_rollouts" in str(caught.value)


async def test_a_redirect_is_not_followed():
    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{elsewhere}/ws")

    async with stand_in(speaking(BEGUN)) as elsewhere, stand_in(redirect) as url:
        with pytest.raises(SlimxError) as caught:
            await play(url, "1")
        assert caught.value.about == f"{url}/ws" and "307" in str(caught.value)


async def test_invalid_actions_are_explained_to_the_model_and_bounded():
    unfit = error("VALIDATION_ERROR")
    async with stand_in(speaking(BEGUN, unfit, observed(reward=None), unfit, unfit)) as url:
        options = {"max_invalid": 2, "invalid_reward": -1.0}
        ctx, trajectory = await play(url, *"12345", environment_options=options)
    assert trajectory.metadata["rewards"] == [-1.0, 0.0, -1.0, -1.0] and trajectory.metadata["ended"] == "done"
    assert ctx.metrics["invalid_actions"] == 3.0
    assert "an integer" in [text for source, _, text in spans(trajectory) if source == "inserted"][1]


async def test_a_server_that_hangs_or_is_not_there_costs_its_rollout_in_time():
    async with stand_in(speaking(BEGUN)) as url:
        with pytest.raises(DeadlineError):
            await play(url, "1", turn_deadline=0.5)
    with pytest.raises(SlimxError) as caught:
        await play("http://127.0.0.1:9", "1")
    assert caught.value.code == "openenv.server"


async def test_actions_may_be_whole_objects_and_observations_too():
    heard: list[Any] = []

    async def speak(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            heard.append(json.loads(message.data))
            await socket.send_json(BEGUN)
        return socket

    text = {"text_options": {"fixed": {"kind": "move"}, "ask": "JSON."}}
    async with stand_in(speak) as url:
        _, trajectory = await play(url, '{"to": [1]}', "[1]", "x", environment_options=text)
    assert [message["type"] for message in heard] == ["reset", "step", "close"]
    assert heard[0]["data"] == {"seed": 5} and heard[1]["data"] == {"to": [1], "kind": "move"}
    assert '{"hint": "Go."}\nJSON.' in spans(trajectory)[1][2] and trajectory.metadata["info"]["invalid"] == 2


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        ({"said": {"line": "one"}}, "one"),
        ({"said": [{"line": "one"}, {"line": ["t"]}, {}]}, 'one\n["t"]\n'),
        ({"said": "one"}, ""),
        ({}, ""),
    ],
)
def test_fields_may_be_nested(observation, shown):
    view = Fields(None, shows="said.line", action="arguments.text", fixed={"tool": "say", "arguments": {"loud": True}})
    assert view.show(observation, {}) == shown
    assert view.action("<answer>two</answer>") == {"tool": "say", "arguments": {"loud": True, "text": "two"}}


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({}, "environment.option", KEY),
        ({"url": "localhost:8000"}, "openenv.url", f"{KEY}.url"),
        ({"url": 8000}, "openenv.url", f"{KEY}.url"),
        ({"url": "http://h", "max_invalid": True}, "environment.max_invalid", f"{KEY}.max_invalid"),
        ({"url": "http://h", "text": "tests.nothing.View"}, "dotted.import", f"{KEY}.text"),
        ({"url": "http://h", "text_options": {"field": 1}}, "environment.option", KEY),
    ],
)
def test_invalid_environment_options_are_refused_before_the_run(options, code, about):
    hook_options = {"environment": PATH, "environment_options": options}
    with refused(code, about=about):
        load_hooks(config_of(generate="multi_turn", options=hook_options))
