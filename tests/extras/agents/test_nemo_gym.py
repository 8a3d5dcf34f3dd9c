"""Resources servers of NeMo Gym as tools: one of its own servers, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from slimx.data.prompts.mapping import make_mapping
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt
from slimx.extras.agents import tools
from slimx.extras.agents.hubs import nemo_gym
from slimx.extras.http.responses import MAX_RESPONSE
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import GivenUp, RewardContext
from tests.extras.agents.served import program, stand_in
from tests.extras.agents.tool_stand import context
from tests.extras.boxes.calls import calling
from tests.needed import hub_python
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of

BOX = "nemo_gym"
KEY = "rollout.options.toolbox_options"
INPUT = "responses_create_params.input"


def tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"count": {"type": "integer"}}}
    return {"type": "function", "name": name, "description": "", "parameters": parameters, "strict": True} | more


ROW = {
    "responses_create_params": {
        "instructions": "Count.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "add 1 then add 2"}]}],
        "tools": [tool("increment_counter"), tool("get_counter_value")],
    },
    "expected_count": 6,
    "initial_count": 3,
}
"""A row in the form of the server's own example data."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("nemo_gym") / "log"
    with program(hub_python("nemo-gym"), "nemo_gym_server.py", log) as url:
        yield url


async def play(url: str, *says: str, row: dict[str, Any] = ROW, **options: Any) -> Any:
    ctx, script = context(*says)
    prompt = Prompt(id="p", **nemo_gym.to_prompt(row))
    trajectory = await tools.generate(ctx, prompt, toolbox=BOX, toolbox_options={"url": url}, **options)
    return trajectory, script, await tools.reward(RewardContext(prompt, None, "", False), trajectory)


@pytest.mark.slow("needs build/hubs")
async def test_a_session_counts_and_its_verdict_is_the_reward(server):
    add = [calling("increment_counter", count=number) for number in (1, 2)]
    right = play(server, *add, calling("increment_counter", count="many"), calling("get_counter_value"), "6")
    wrong = play(server, add[0], calling("get_counter_value"), "6")
    (done, script, reward), (_, other, none) = await asyncio.gather(right, wrong)
    assert (reward, none) == ({"reward": 1.0}, {"reward": 0.0}), "each rollout has a session of its own"
    assert '"count":6' in script.received[4][0] and '"count":4' in other.received[2][0]
    assert done.metadata["tool_errors"] == {"status_422": 1} and done.metadata["tool_calls"] == 4


def answering(**answers: Any) -> Any:
    """Makes a handler that answers each path with its status and text, and keeps what it was sent in `heard`."""
    heard: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        heard.append((path, await request.json()))
        status, text = answers.get(path, (200, "{}"))
        if status == 0:
            await asyncio.sleep(600)
        if status < 0 and request.transport is not None:
            request.transport.close()
        if status == 307:  # what is there would answer well
            return web.Response(status=status, headers={"Location": text})
        return web.Response(status=abs(status) or 200, text=text)

    answer.heard = heard  # type: ignore[attr-defined]
    return answer


async def test_the_verifier_reads_the_whole_rollout_as_a_response():
    server = answering(verify=(200, '{"reward": 0.5}'), get_counter_value=(200, '{"count": 3}'))
    async with stand_in(server) as url:
        trajectory, script, reward = await play(url, f"So: {calling('get_counter_value')}", "<tool_call>{", "It is 3.")
    assert reward == {"reward": 0.5} and trajectory.metadata["ended"] == "done"
    assert script.received[0][0].startswith("[tools ") and "<user>system: Count.<end>" in script.received[0][0]
    assert "<user>user: add 1 then add 2<end>" in script.received[0][0]
    paths = [path for path, _ in server.heard]
    assert paths == ["seed_session", "get_counter_value", "verify"] and server.heard[0][1] == ROW
    verified = server.heard[2][1]
    assert {key: verified[key] for key in ROW} == ROW
    output = verified["response"]["output"]
    kinds = ["message", "function_call", "function_call_output", "message", "message"]
    assert [item["type"] for item in output] == kinds
    assert output[1]["name"] == "get_counter_value" and output[1]["call_id"] == output[2]["call_id"]
    assert output[2]["output"] == '{"count": 3}' and output[0]["content"][0]["text"] == "So:"
    assert output[4]["content"][0]["text"] == "It is 3."


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"seed_session": (500, "no")}, "tools lost"),
        ({"seed_session": (0, "")}, "tools deadline"),
        ({"get_counter_value": (-200, "")}, "tools lost"),
        ({"get_counter_value": (200, "x" * (MAX_RESPONSE + 1))}, "tools lost"),
        ({"verify": (500, "no")}, "tools lost"),
        ({"verify": (200, "no")}, "tools lost"),
        ({"verify": (200, "[]")}, "tools lost"),
        ({"verify": (200, '{"reward": NaN}')}, "tools lost"),
        ({"verify": (200, '{"reward": null}')}, "tools lost"),
        ({"verify": (0, "")}, "tools deadline"),
        ({"seed_session": (307, "/elsewhere")}, "tools lost"),
        ({"verify": (307, "/elsewhere")}, "tools lost"),
    ],
)
async def test_a_server_that_answers_wrongly_or_not_at_all_is_counted(answers, reason):
    good = {path: (200, '{"reward": 1}') for path in ("verify", "elsewhere")}
    hangs = {path for path, (status, _) in answers.items() if not status}
    opens, calls = (5.0 if hangs & {path} else 300.0 for path in ("seed_session", "verify"))
    async with stand_in(answering(**good | answers)) as url:
        with pytest.raises(GivenUp) as caught:
            await play(url, calling("get_counter_value"), "6", open_deadline=opens, call_deadline=calls)
    assert caught.value.reason == reason


async def test_a_server_that_is_not_there_is_counted():
    with pytest.raises(GivenUp) as caught:
        await play("http://127.0.0.1:9", "6")
    assert caught.value.reason == "tools lost"


@pytest.mark.parametrize(
    ("parameters", "about"),
    [
        (None, INPUT),
        ({"input": []}, INPUT),
        ({"input": [{"type": "function_call", "name": "f"}]}, INPUT),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, INPUT),
    ],
)
def test_rows_that_cannot_begin_a_rollout_are_refused(parameters, about):
    with refused("nemo_gym.row", about=about):
        nemo_gym.to_prompt({"responses_create_params": parameters})


def test_rows_are_read_from_a_file_though_their_ids_repeat(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [ROW | {"id": 1}, ROW | {"id": 1}, {"responses_create_params": {"input": "Hello."}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(path, make_mapping(None, f"{nemo_gym.__name__}.to_prompt", None))
    assert len({prompt.id for prompt in prompts}) == 3
    assert [prompt.metadata["nemo_gym"] for prompt in prompts] == rows
    assert prompts[2].messages == [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize(
    "named", [tool("verify"), tool("../admin"), tool(".."), tool("."), tool("..\n"), tool("a", type="web_search")]
)
async def test_tools_that_no_server_carries_out_are_refused(named):
    row = {"responses_create_params": {"input": "Hello.", "tools": [named]}}
    async with stand_in(answering()) as url:
        with refused("nemo_gym.tool", about=named["name"]):
            await play(url, "6", row=row)


async def test_a_prompt_without_a_row_is_named():
    ctx, _ = context("6")
    with refused("nemo_gym.row", about="p"):
        prompt = Prompt(id="p", messages=[{"role": "user", "content": "?"}])
        await tools.generate(ctx, prompt, toolbox=BOX, toolbox_options={"url": "http://127.0.0.1:9"})


@pytest.mark.parametrize("url", ["localhost", 3])
def test_an_address_that_is_none_is_refused_before_the_run(url):
    with refused("nemo_gym.url", about=f"{KEY}.url"):
        parameters = {"toolbox": BOX, "toolbox_options": {"url": url}}
        load_hooks(config_of(generate="tools", options=parameters))
