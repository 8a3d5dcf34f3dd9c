"""Prompts of several sources are drawn by weight, and go on where they were saved."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from slimx.config.sections.rollout import PromptSet
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Prompt
from slimx.extras.datasets.mixed_source import MixedSource
from tests.refusals import refused


def some(name: str, count: int) -> list[Prompt]:
    return [Prompt(id=f"{name}{index}", token_ids=[index]) for index in range(count)]


def mixed(*sets: PromptSet, seed: int = 1, per_step: int = 10) -> MixedSource:
    return MixedSource(sets, {prompt_set.name: some(prompt_set.name, 7) for prompt_set in sets}, seed, per_step)


def take(source: Any, count: int) -> list[str]:
    return [source.next().id for _ in range(count)]


def test_sources_are_drawn_by_weight_each_in_its_order():
    sets = PromptSet(path="a", name="a", weight=3), PromptSet(path="b", name="b")
    taken = take(mixed(*sets), 2000)
    assert 1400 < Counter(name[0] for name in taken)["a"] < 1600
    assert [name for name in taken if name[0] == "a"][:14] == take(PromptSource(some("a", 7), 1), 14)
    assert taken != take(mixed(*sets, seed=2), 2000)


def test_weights_change_at_their_steps():
    sets = PromptSet(path="a", name="a", weight={0: 1, 3: 0}), PromptSet(path="b", name="b", weight={3: 2})
    taken = take(mixed(*sets), 60)
    assert {name[0] for name in taken[:30]} == {"a"} and {name[0] for name in taken[30:]} == {"b"}


@pytest.mark.parametrize("served", [0, 3, 17, 64])
def test_a_resumed_mixture_continues_and_may_change_its_weights(served):
    sets = PromptSet(path="a", name="a", weight={0: 2, 4: 1}), PromptSet(path="b", name="b")
    source = mixed(*sets)
    take(source, served)
    state = json.loads(json.dumps(source.state()))
    restored = mixed(*sets)
    take(restored, 5)
    restored.restore(state)
    assert restored.state() == state and take(restored, 50) == take(source, 50)
    changed = mixed(PromptSet(path="a", name="a"), PromptSet(path="b", name="b", weight=0))
    changed.restore(state)
    assert {name[0] for name in take(changed, 30)} == {"a"}


def test_a_mixture_refuses_the_state_of_other_sources():
    a, b = PromptSet(path="a", name="a"), PromptSet(path="b", name="b")
    state = mixed(a, b).state()
    with refused("prompts.changed", about="b"):
        mixed(a).restore(state)
    with refused("prompts.changed", about="seed"):
        mixed(a, b, seed=2).restore(state)
    with refused("prompts.state", about="rollout.sources"):
        mixed(a, b).restore(PromptSource(some("a", 7), 1).state())
