"""The line about a start names what is started, and the one about its end the seconds."""

from __future__ import annotations

import time

import pytest

from slimx.config.schema import Config
from slimx.orchestration.start.starting import Starting
from tests.refusals import numbers

ENGINES = [{"name": "a", "count": 2}, {"name": "judge", "count": 1, "model": "m", "frozen": True}]
CRITIC = {"algorithm": {"name": "ppo"}, "critic": {"placement": "own"}}


@pytest.mark.parametrize(
    ("changed", "trainers", "parts"),
    [
        ({"trainer": {"world_size": 2}}, True, "2 trainers, 1 engine"),
        ({"trainer": {"world_size": 2}}, False, "1 engine"),
        ({"rollout": {"prompts": "p", "engines": ENGINES}}, True, "1 trainer, 3 engines"),
        ({"rollout": {"prompts": "p", "engines": []}, "algorithm": {"name": "sft"}}, True, "1 trainer"),
        (CRITIC, True, "2 trainers, 1 engine"),
    ],
)
def test_a_start_counts_ranks_and_engines(changed, trainers, parts):
    known = {"run": {"dir": "d"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}
    starting = Starting.of(Config.model_validate(known | changed), trainers=trainers)
    assert starting.parts == parts and parts in starting.line


def test_seconds_of_a_start_are_those_since_it_was_announced():
    assert numbers(Starting("2 trainers", since=time.monotonic() - 34).ready) == [2, 34]
