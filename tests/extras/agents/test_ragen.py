"""Environments in RAGEN's form: a configuration object, names of actions in an attribute, several actions per turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from slimx.data.records import Prompt
from slimx.extras.agents.hubs.gymnasium import Gymnasium
from slimx.rollout.hook_loading import load_hooks
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of

HERE = __name__
KEY = "rollout.options.environment_options"
PROMPT = Prompt(id="walk", messages=[{"role": "user", "content": "Go."}], metadata={"seed": 3})


@dataclass
class WalkConfig:
    length: int = 3
    action_lookup: dict[int, str] = field(default_factory=lambda: {1: "Back", 2: "Ahead"})


class Numbers:
    """A space of whole numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def contains(self, number: int) -> bool:
        return number in self.numbers


class Walk:
    """A path to walk along, whose actions are numbers from 1; every step costs 0.1, and the end of the path gives 1.

    As in RAGEN, `action_space` is of a game that it extends, whose actions are numbers from 0.
    """

    action_space = Numbers(0, 1)
    ACTION_SPACE = Numbers(1, 2)

    def __init__(self, config: WalkConfig) -> None:
        self.config = config
        self.place = 0

    def reset(self, seed: int | None = None, mode: str | None = None) -> str:
        if seed == 4:  # names change from episode to episode, as in a bandit with shuffled arms
            self.config.action_lookup = {2: "Back", 1: "Ahead"}
        return f"at {self.place}"

    def step(self, action: int) -> tuple[str, float, bool, dict[str, Any]]:
        self.place += 1 if self.config.action_lookup[action] == "Ahead" else -1
        done = self.place == self.config.length
        return f"at {self.place}", float(done) - 0.1, done, {}


OPTIONS = {
    "make": f"{HERE}.Walk",
    "make_options": {"config": {"make": f"{HERE}.WalkConfig", "length": 2}},
    "text_options": {"actions": "config.action_lookup", "separator": "||"},
}


async def begun(prompt: Prompt = PROMPT, **options: Any) -> Gymnasium:
    world = Gymnasium(**OPTIONS | options)
    await world.reset(prompt, 0)
    return world


async def test_a_turn_of_several_actions_is_executed_in_their_order():
    world = await begun()
    step = await world.step("<answer>ahead || Back||nowhere || AHEAD</answer>")
    assert (step.text, step.done, step.info["steps"], step.counts) == ("at 1", False, 3, {"invalid_actions": 0})
    assert step.reward == pytest.approx(-0.3)
    end = await world.step("<answer>Ahead || Back</answer>")
    assert (end.text, end.done, end.info["steps"]) == ("at 2", True, 4), "nothing follows the end"
    assert end.reward == pytest.approx(0.9)


async def test_a_turn_without_a_known_action_changes_nothing():
    world = await begun()
    step = await world.step("<answer>nowhere || </answer>")
    assert step.counts == {"invalid_actions": 1} and step.text.endswith("at 0")


async def test_names_of_actions_are_read_in_every_episode():
    shuffled = Prompt(id="walk", messages=PROMPT.messages, metadata={"seed": 4})
    for prompt in (PROMPT, shuffled):
        world = await begun(prompt)
        assert (await world.step("ahead")).text == "at 1"


async def test_text_actions_may_be_several_too():
    world = await begun(text_options={"separator": ","}, make=f"{HERE}.Writer", make_options={})
    assert (await world.step("a, b,")).text == "a b"


class Writer:
    """Writes down the actions of an episode, which are words."""

    def reset(self, seed: int | None = None) -> str:
        self.words: list[str] = []
        return ""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.words.append(action)
        return " ".join(self.words), 0.0, False, {}


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({"text_options": {"actions": "config.names"}}, "environment.actions", "text_options.actions"),
        ({"text_options": {"separator": ""}}, "environment.separator", "text_options.separator"),
        (
            {"make_options": {"config": {"make": f"{HERE}.Nothing"}}},
            "dotted.missing",
            f"{KEY}.make_options.config.make",
        ),
        (
            {"make_options": {"config": {"make": f"{HERE}.WalkConfig", "size": 2}}},
            "gymnasium.raised",
            f"{HERE}.Walk",
        ),
    ],
)
def test_invalid_options_are_refused_before_the_run(options, code, about):
    hook_options = {"environment": "gymnasium", "environment_options": OPTIONS | options}
    with refused(code, about=about):
        load_hooks(config_of(generate="multi_turn", options=hook_options))
