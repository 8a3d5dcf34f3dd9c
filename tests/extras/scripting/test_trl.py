"""Reward functions written for TRL score a batch of one trajectory, or of the trajectories of a group."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimx.data.records import Group, Prompt
from slimx.extras.scripting.functions import with_hooks
from slimx.extras.scripting.trl import TrlReward
from slimx.rewards.needs import asks_for_process, needs_process
from slimx.rollout.flow.reward_pool import RewardPool
from slimx.rollout.hook_loading import form_facts, load_hooks, load_rewards, name_of
from slimx.rollout.hooks import RewardContext
from tests.extras.rewards.reward_stand import context, trajectory
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of, the_tokenizer

SEEN: list[dict[str, Any]] = []


def right(completions, answer, **kwargs):
    SEEN.append(kwargs)
    return [float(said[-1]["content"] == wanted) for said, wanted in zip(completions, answer, strict=True)]


async def length(prompts, completions, completion_ids, scale=1.0, log_metric=None):
    log_metric("batch", len(prompts))
    return [scale * len(ids) if text else None for ids, text in zip(completion_ids, completions, strict=True)]


async def awaited(completions, **kwargs):
    return [len(said.strip()) for said in completions]


@needs_process
def heavy(completions, **kwargs):
    return [0.0] * len(completions)


def one_number(completions, **kwargs):
    return 1.0


def with_state(completions, trainer_state, **kwargs):
    return []


def loaded(function: str, **keys: Any) -> Any:
    return load_rewards(config_of(reward__function=f"trl:{__name__}.{function}", **keys))


def test_a_message_is_scored_with_the_columns_of_its_prompt():
    hook = loaded("right")
    assert asyncio.run(hook(context("4", "4", level=3), trajectory())) == 1.0
    assert asyncio.run(hook(context("5", "4", level=3), trajectory())) == 0.0
    assert SEEN[-1]["level"] == [3] and SEEN[-1]["prompts"] == [[{"role": "user", "content": "Why?"}]]
    assert name_of(hook) == f"{__name__}.right" and not asks_for_process(hook) and asks_for_process(loaded("heavy"))


def test_a_group_is_one_batch_of_texts_if_its_prompt_has_no_messages():
    hook = loaded("length", reward__scope="group", reward__options={"scale": 2.0})
    prompt = Prompt(id="p", token_ids=[5, 6])
    ctx = RewardContext(prompt, the_tokenizer(), "a", False)
    ctx.responses.append(RewardContext(prompt, the_tokenizer(), "", False).responses[0])
    group = Group(id="g", prompt=prompt, trajectories=[trajectory(1), trajectory(3)])
    assert asyncio.run(hook(ctx, group)) == [2.0, 0.0] and ctx.metrics == {"batch": 2}


def shortest(prompts, completions, **kwargs):
    return [float(len(said.strip()) < len(asked.strip())) for asked, said in zip(prompts, completions, strict=True)]


def rows_in(tmp_path: Path, *rows: Any) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


TEXT = {"prompt": "How many?"}
CHAT = {"prompt": [{"role": "user", "content": "How many?"}]}


def test_texts_in_the_column_prompt_stay_texts_as_in_trl(tmp_path: Path):
    hook = loaded("shortest", prompts=rows_in(tmp_path, TEXT), fields={"prompt": "prompt"})
    assert asyncio.run(hook(context(" 4 "), trajectory())) == 1.0
    assert asyncio.run(hook(context("a long answer"), trajectory())) == 0.0


@pytest.mark.parametrize(
    ("row", "column", "texts"),
    [(TEXT, "prompt", True), (CHAT, "prompt", False), ({"question": "a"}, "question", False)],
)
def test_the_first_rows_of_all_files_decide_on_texts(tmp_path: Path, row: Any, column: str, texts: bool):
    function = f"trl:{__name__}.right"
    keys: dict[str, Any] = {"reward__function": function, "fields": {"prompt": column}}
    config = config_of(prompts=rows_in(tmp_path, row), **keys)
    assert form_facts(config) == {"trl": {"texts": texts}}
    one = {"name": "a", "path": config.rollout.prompts}
    two = {"name": "b", "path": rows_in(tmp_path, CHAT), "fields": {"prompt": "prompt"}}
    assert form_facts(config_of(prompts=None, sources=[one, two], **keys)) == {"trl": {"texts": False}}
    assert form_facts(config_of(prompts="nothing.jsonl", **keys)) == {"trl": {"texts": False}}


@pytest.mark.parametrize(("function", "texts"), [("shortest", False), ("right", True), ("awaited", False)])
def test_a_function_for_the_other_form_is_told_the_form(function: str, texts: bool):
    hook = replace(loaded(function), texts=texts)
    with refused("trl.form", about=f"{__name__}.{function}"):
        asyncio.run(hook(context("4", "4"), trajectory()))


def test_another_mistake_of_a_function_is_raised_as_it_is():
    hook = TrlReward(lambda completions: [len(None)], "r.right", {})
    with pytest.raises(TypeError):
        asyncio.run(hook(context("4"), trajectory()))


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"reward__function": f"trl:{__name__}.loaded"}, "trl.signature"),
        ({"reward__function": f"trl:{__name__}.with_state"}, "trl.signature"),
        ({"reward__function": f"trl:{__name__}.nothing"}, "dotted.missing"),
        ({"reward__function": f"{__name__}.right"}, "hooks.prefix"),
        ({"generate": f"trl:{__name__}.right"}, "trl.hook"),
        ({"filter": f"trl:{__name__}.right"}, "trl.hook"),
    ],
)
def test_what_is_no_reward_of_trl_is_refused(keys: dict[str, Any], code: str):
    with refused(code, about=None):
        load_hooks(config_of(**keys))


def test_a_reward_of_trl_may_run_an_event_loop_of_its_own():
    hook = replace(loaded("right"), function=lambda completions: asyncio.run(asyncio.sleep(0, [0.5])))
    assert asyncio.run(hook(context("4"), trajectory())) == 0.5


def test_a_single_number_for_a_batch_is_refused():
    with refused("trl.returned", about=f"{__name__}.one_number"):
        asyncio.run(loaded("one_number")(context("4"), trajectory()))


async def test_a_run_shows_the_sentence_about_such_a_function_alone():
    pool = RewardPool(loaded("one_number"), workers=1, deadline_s=300)
    try:
        with refused("reward.raised", about=f"{__name__}.one_number") as caught:
            await pool.judge(context("4"), trajectory())
    finally:
        pool.close()
    assert "SlimxError" not in str(caught.value) and str(caught.value).endswith(str(caught.value.__cause__))


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, lambda values: [*map(torch.tensor, values)]])
def test_an_array_or_a_tensor_is_a_list_of_rewards(make: Any):
    hook = TrlReward(lambda completions: make([0.5] * len(completions)), "r.right", {})
    assert asyncio.run(hook(context("4"), trajectory())) == 0.5


def test_a_column_that_prompts_lack_is_named():
    hook = TrlReward(lambda completions, *, solution, level=1: [0.0], "r.right", {})
    with refused("trl.column", about="solution"):
        asyncio.run(hook(context("4"), trajectory()))
    assert asyncio.run(hook(context("4", solution="4"), trajectory())) == 0.0


def test_a_script_passes_such_a_function_as_it_is():
    config = with_hooks(config_of(), reward=right)
    assert config.reward.function == f"trl:{__name__}.right" and form_facts(config) == {"trl": {"texts": False}}
    assert asyncio.run(load_rewards(config)(context("4", "4"), trajectory())) == 1.0
