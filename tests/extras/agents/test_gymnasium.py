"""Step environments as text: gymnasium's own games played turn by turn, and equal states that GiGPO compares."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Prompt, Trajectory
from slimx.environments.processes import Environments
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.agents import multi_turn
from slimx.extras.agents.hubs.gymnasium import Gymnasium
from slimx.extras.agents.hubs.views import state_digest
from slimx.extras.token_level.gigpo import step_advantages
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext
from tests.needed import need_package
from tests.refusals import refused
from tests.unit.environments.environment_stand import Counting
from tests.unit.rollout.rollout_stand import config_of
from tests.unit.rollout.scripted_engine import ScriptedEngine, context, spans

MOVES = ("left", "down", "right", "up")

HERE = __name__
PATH = "gymnasium"
KEY = "rollout.options.environment_options"
LAKE = {"id": "FrozenLake-v1", "make_options": {"is_slippery": False}, "text": f"{HERE}.Lake"}
OLD = {"make": f"{HERE}.OldStyle"}
PROMPT = Prompt(id="lake", messages=[{"role": "user", "content": "Go."}])


class Lake:
    """A user's view of FrozenLake: the row and column in words."""

    def __init__(self, environment: Any, *, columns: int = 4):
        self.columns = columns

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        return "row {} column {}".format(*divmod(int(observation), self.columns))

    def action(self, text: str) -> Any:
        return MOVES.index(text.strip()) if text.strip() in MOVES else None


class Nameless(Lake):
    """Tells states apart by their column alone."""

    def state(self, observation: Any, info: Mapping[str, Any]) -> str:
        return f"column {int(observation) % self.columns}"


class OldStyle:
    """Text in and text out, with gym's former interface, as RAGEN's environments have it."""

    def __init__(self, *, target: str = "b", reward: Any = 1.0, answer: Any = None, observes: Any = None):
        self.target, self.reward, self.answer, self.observes = target, reward, answer, observes
        self.closed = False

    def reset(self, seed: int | None = None) -> Any:
        self.seed = seed
        return self.observes or f"seed {seed}"

    def step(self, action: str) -> Any:
        if action == "raise":
            raise KeyError("no such move")
        if action == "hang":
            time.sleep(600)
        done = action == self.target
        return self.answer or (f"you said {action}", self.reward if done else 0.0, done, {"success": done})


@pytest.fixture
def gymnasium() -> None:
    need_package("gymnasium")


async def play(*turns: str, prompt: Prompt = PROMPT, finish_reason: str = "stop", **options: Any) -> Any:
    ctx = context(ScriptedEngine(*turns, finish_reason=finish_reason))
    trajectory = await multi_turn.generate(
        ctx, prompt, environment=PATH, environment_options=options, max_turns=len(turns)
    )
    return ctx, trajectory


async def begun(prompt: Prompt = PROMPT, **options: Any) -> tuple[Gymnasium, Any]:
    world = Gymnasium(**options)
    return world, await world.reset(prompt, 0)


async def test_a_path_over_the_lake_is_rewarded_at_its_goal(gymnasium):
    actions = ("down", "down", "right", "right", "down", "right")
    ctx, trajectory = await play(*actions, **LAKE)
    observations = [text for source, _, text in spans(trajectory) if source == "inserted"]
    fields = [
        "row 0 column 0",
        "row 1 column 0",
        "row 2 column 0",
        "row 2 column 1",
        "row 2 column 2",
        "row 3 column 2",
    ]
    assert [field in text for field, text in zip(fields, observations, strict=True)] == [True] * 6
    assert trajectory.metadata["rewards"] == [0.0] * 5 + [1.0] and trajectory.metadata["ended"] == "done"
    assert trajectory.metadata["info"] | {"state": ""} == {"steps": 6, "invalid": 0, "return": 1.0, "state": ""}
    assert [turn.reward for turn in trajectory.turns] == [0.0] * 5 + [1.0]
    assert len({turn.state_key for turn in trajectory.turns}) == 6
    assert ctx.metrics == {"tool_calls": 0.0, "invalid_actions": 0.0}
    assert await multi_turn.reward(RewardContext(PROMPT, None, "", False), trajectory) == 1.0


async def test_gigpo_compares_turns_with_equal_states_across_rollouts(gymnasium):
    """Both rollouts are twice in (0, 0), and in (1, 0); only the first goes on from there to the goal. Returns with
    gamma 0.5 are 2^-k, k the turns to the goal, and 0 in the second."""
    episodes = (
        ("down", "up", "down", "down", "right", "right", "down", "right"),
        ("down", "up", "down", "right"),  # into the hole at (1, 1)
    )
    group: list[Trajectory] = []
    for index, actions in enumerate(episodes):
        _, trajectory = await play(*actions, **LAKE)
        trajectory.index, trajectory.reward = index, sum(trajectory.metadata["rewards"])
        group.append(trajectory)
    keys = [[turn.state_key for turn in trajectory.turns] for trajectory in group]
    assert keys[0][:4] == keys[1] and keys[0][0] == keys[0][2] and keys[0][1] == keys[0][3] != keys[0][0]
    found = step_advantages(group, gamma=0.5, normalize_std=False, eps=0.0)
    start = [2**-7, 2**-5, 0, 0]  # (0, 0): turns 0 and 2 of each rollout
    second = [2**-6, 2**-4, 0, 0]  # (1, 0): turns 1 and 3
    for number, trajectory in enumerate(group):
        for span in trajectory.spans:
            if span.source != "sampled":
                continue
            values = start if span.turn in (0, 2) else second
            expected = values[2 * number + span.turn // 2] - np.mean(values) if span.turn < 4 else 0.0
            assert found[number][span.start - 1 : span.stop - 1] == pytest.approx(expected), span


async def test_a_cut_off_turn_has_its_state_too(gymnasium):
    _, trajectory = await play("down", finish_reason="length", **LAKE)
    _, whole = await play("down", **LAKE)
    assert trajectory.turns[0].state_key == whole.turns[0].state_key is not None


async def test_an_environment_that_tells_no_states_apart_describes_no_turns():
    trajectory = await multi_turn.generate(
        context(ScriptedEngine("1", "2")), PROMPT, environment=f"{Counting.__module__}.Counting"
    )
    assert trajectory.turns == []


async def test_turns_without_an_action_change_nothing_and_end_the_rollout(gymnasium):
    ctx, trajectory = await play(
        "down", "fly", "up up", "down", "", "jump", "dance", "down", **LAKE, invalid_reward=-0.25, max_invalid=3
    )
    assert trajectory.metadata["rewards"] == [0.0, -0.25, -0.25, 0.0, -0.25, -0.25, -0.25]
    assert trajectory.metadata["ended"] == "done" and trajectory.metadata["info"]["steps"] == 2
    assert ctx.metrics["invalid_actions"] == trajectory.metadata["info"]["invalid"] == 5
    keys = [turn.state_key for turn in trajectory.turns]
    assert keys[1] == keys[2] == keys[3] and len(set(keys[4:])) == 1
    assert sum("row 1 column 0" in text for source, _, text in spans(trajectory) if source == "inserted") == 3


async def test_named_actions_need_no_custom_view(gymnasium):
    options = {
        "id": "FrozenLake-v1",
        "make_options": {"is_slippery": False, "render_mode": "ansi"},
        "text_options": {"actions": {"Down": 1, "Right": 2, "Over": 9}, "ask": "Which way?"},
    }
    world, start = await begun(**options)
    assert start.text == "[S]FFF\nFHFH\nFFFH\nHFFG\nWhich way?"
    step = await world.step("Right, I think. <answer> down </answer>")
    assert "\nSFFF\n[F]HFH\n" in f"\n{step.text.partition(chr(10))[2]}\n" and step.counts == {"invalid_actions": 0}
    assert (await world.step("over")).counts == {"invalid_actions": 1}, "outside the action space"
    await world.close()


async def test_rollouts_of_a_prompt_begin_alike_and_prompts_say_where(gymnasium):
    taxi = {"id": "Taxi-v4"}
    states = []
    for seed, prompt in enumerate((PROMPT, PROMPT, *(Prompt(id=f"{n}", token_ids=[1]) for n in range(8)))):
        world = Gymnasium(**taxi)
        states.append((await world.reset(prompt, seed)).state_key)
    assert states[0] == states[1] and len(set(states)) > 4
    same = [Prompt(id=name, token_ids=[1], metadata={"seed": 5}) for name in "ab"]
    assert len({(await begun(prompt, **taxi))[1].state_key for prompt in same}) == 1
    assert (await begun(same[0], **OLD))[1].text == "seed 5"
    for seed in (-1, "x", True):
        with refused("environment.seed", about="p"):
            await begun(Prompt(id="p", token_ids=[1], metadata={"seed": seed}), **OLD)


async def test_a_view_may_tell_states_apart_itself(gymnasium):
    world, start = await begun(**LAKE | {"text": f"{HERE}.Nameless"})
    assert start.state_key == (await world.step("down")).state_key == "column 0"
    assert (await begun(**LAKE))[1].state_key != (await world.step("down")).state_key


async def test_text_environments_with_gyms_former_interface_run_too():
    world, _ = await begun(**OLD)
    step = await world.step("<action>a</action>")
    assert (step.text, step.done, step.reward) == ("you said a", False, 0.0)
    end = await world.step("b")
    assert end.done and end.reward == 1.0 and end.state_key == state_digest("you said b")


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({}, "gymnasium.which", KEY),
        ({"id": "FrozenLake-v1", "make": f"{HERE}.OldStyle"}, "gymnasium.which", KEY),
        ({"id": "NoSuchLake-v1"}, "gymnasium.raised", "NoSuchLake-v1"),
        ({"make": f"{HERE}.Nothing"}, "dotted.missing", f"{KEY}.make"),
        (OLD | {"make_options": {"aim": "c"}}, "gymnasium.raised", f"{HERE}.OldStyle"),
        (OLD | {"text": f"{HERE}.Nothing"}, "dotted.missing", f"{KEY}.text"),
        (OLD | {"text_options": {"moves": 1}}, "gymnasium.raised", f"{HERE}.OldStyle"),
        (OLD | {"max_invalid": 0}, "environment.max_invalid", f"{KEY}.max_invalid"),
        (OLD | {"make_options": {"observes": [object()]}}, "environment.state", "object"),
        (OLD | {"rounds": 3}, "environment.option", KEY),
    ],
)
def test_invalid_gymnasium_options_are_refused_before_the_run(gymnasium, options, code, about):
    hook_options = {"environment": PATH, "environment_options": options}
    with refused(code, about=about):
        load_hooks(config_of(generate="multi_turn", options=hook_options))


def test_a_missing_package_is_refused_with_its_pinned_version(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with refused("gymnasium.package", about=f"{KEY}.id"):
        Gymnasium(id="FrozenLake-v1")


@pytest.mark.parametrize(
    ("made_with", "text", "code"),
    [
        ({}, "raise", "gymnasium.raised"),
        ({"answer": ("seen", 1.0)}, "a", "gymnasium.answer"),
        ({"answer": "seen"}, "a", "gymnasium.answer"),
        ({"reward": math.nan}, "b", "gymnasium.answer"),
        ({"reward": "much"}, "b", "gymnasium.answer"),
        ({"answer": (SimpleNamespace(), 0.0, False, {})}, "a", "environment.state"),
    ],
)
async def test_an_environment_that_breaks_is_named(made_with, text, code):
    world, _ = await begun(**OLD, make_options=made_with)
    with pytest.raises(SlimxError) as caught:
        await world.step(text)
    assert caught.value.code == code


async def test_an_environment_that_hangs_is_killed_with_its_process():
    environments = Environments()
    world = environments.make(PATH, OLD, deadline_s=300.0, rollout="g/0", processes=1)
    try:
        assert (await world.reset(PROMPT, 0)).text.startswith("seed ")
        assert (await world.step("a")).state_key == state_digest("you said a")
        world._deadline_s = 5.0
        with pytest.raises(DeadlineError):
            await world.step("hang")
    finally:
        await world.close()
        environments.close()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (np.arange(4), np.arange(4), True),
        (np.arange(4), np.arange(4).astype(np.float32), False),
        (np.arange(4), np.arange(4).reshape(2, 2), False),
        ({"a": 1, "b": [2.0]}, {"b": [2.0], "a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        (np.int64(3), 3, True),
        ("3", 3, False),
        ([1, [2]], [[1], 2], False),
        ((1, 2), [1, 2], True),
        (["ab", "c"], ["a", "bc"], False),
        ("a\nstr 'b'", ["a", "b"], False),
    ],
)
def test_states_are_equal_where_observations_are(one, other, alike):
    assert (state_digest(one) == state_digest(other)) is alike
