"""Resources servers of NeMo Gym with /reset and /step: a stand-in that plays, and servers that misbehave."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from slimx.data.records import Prompt
from slimx.extras.agents import multi_turn
from slimx.extras.agents.hubs import nemo_gym
from slimx.extras.agents.hubs.nemo_gym_steps import NemoGymSteps
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext
from tests.extras.agents.served import stand_in
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of
from tests.unit.rollout.scripted_engine import ScriptedEngine, context, spans

ROW: dict[str, Any] = {"responses_create_params": {"input": [{"role": "user", "content": "Which?"}]}, "number": 7}
PROMPT = Prompt(id="p", **nemo_gym.to_prompt(ROW))


def guessing(*, closes: bool = False) -> Any:
    """Returns a server whose sessions are guessed numbers; a cookie identifies them."""
    guesses: dict[str, int] = {}
    heard: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        path = request.match_info["path"]
        heard.append((path, body))
        if path == "reset":
            name = str(len(guesses))
            guesses[name] = 0
            info = {"supports_explicit_close": True} if closes else {}
            response = web.json_response({"observation": "From 0 to 9.", "info": info})
            response.set_cookie("session", name)
            return response
        guesses[request.cookies["session"]] += 1
        said = body["response"]["output"][0]["content"][0]["text"] if path == "step" else ""
        right = said == str(body.get("number"))
        reward = 1.0 if right else -0.25
        more = {"observation": None if right else "No.", "truncated": guesses[request.cookies["session"]] == 3}
        return web.json_response({"reward": reward, "terminated": right, "info": {"said": said}} | more)

    answer.heard = heard  # type: ignore[attr-defined]
    return answer


async def play(url: str, *says: str, prompt: Prompt = PROMPT) -> Any:
    ctx = context(ScriptedEngine(*says))
    trajectory = await multi_turn.generate(
        ctx, prompt, environment="nemo_gym", environment_options={"url": url}, max_turns=len(says)
    )
    return trajectory, await multi_turn.reward(RewardContext(prompt, None, "", False), trajectory)


async def test_a_session_is_played_to_its_end():
    server = guessing()
    async with stand_in(server) as url:
        trajectory, reward = await play(url, "4", "7", "8")
        other, less = await play(url, "1", "2", "3", "7")
    assert trajectory.metadata["rewards"] == [-0.25, 1.0] and reward == 0.75
    assert trajectory.metadata["ended"] == "done" and trajectory.metadata["info"] == {"said": "7"}
    observations = [text for source, _, text in spans(trajectory) if source == "inserted"]
    assert "From 0 to 9." in observations[0] and "No." in observations[1]
    assert other.metadata["turns"] == 3 and less == -0.75, "the server ended it, in a session of its own"
    assert [path for path, _ in server.heard[:3]] == ["reset", "step", "step"]
    assert server.heard[0][1] == ROW and server.heard[1][1]["number"] == 7


@pytest.mark.parametrize("closes", [True, False])
async def test_a_session_is_closed_where_the_server_offers_it(closes):
    server = guessing(closes=closes)
    async with stand_in(server) as url:
        await play(url, "7")
    assert ("close", {}) in server.heard if closes else [path for path, _ in server.heard] == ["reset", "step"]


def answering(status: int, text: str) -> Callable[[web.Request], Any]:
    """Returns a server that answers /reset well, and everything else with a status and text."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.match_info["path"] == "reset":
            return web.json_response({"observation": "Go.", "info": {}})
        return web.Response(status=status, text=text)

    return answer


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (500, "{}"),
        (404, ""),
        (200, "no JSON"),
        (200, "[]"),
        (200, json.dumps({"reward": "much"})),
        (200, '{"reward": NaN}'),
    ],
)
async def test_a_server_without_an_answer_is_named(status, text):
    async with stand_in(answering(status, text)) as url:
        with refused("tools.lost", about=url):
            await play(url, "7")


async def test_a_server_that_is_not_there_is_named():
    with refused("tools.lost", about="http://127.0.0.1:9"):
        await play("http://127.0.0.1:9", "7")


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (Prompt(id="p", messages=PROMPT.messages), "nemo_gym.row"),
        (
            Prompt(
                id="p",
                messages=PROMPT.messages,
                metadata={"nemo_gym": {"responses_create_params": {"tools": [{"name": "add"}]}}},
            ),
            "nemo_gym.tool",
        ),
    ],
)
async def test_a_prompt_that_it_cannot_play_is_refused(prompt, code):
    world = NemoGymSteps(url="http://127.0.0.1:9")
    with refused(code, about="p"):
        await world.reset(prompt, 0)
    await world.close()


def test_an_address_that_is_none_is_refused_before_the_run():
    with refused("nemo_gym.url", about="rollout.options.environment_options.url"):
        options = {"environment": "nemo_gym", "environment_options": {"url": "localhost:8000"}}
        load_hooks(config_of(generate="multi_turn", options=options))
