"""The start of trainers and engines: its time by the weights that a node reads, and lines that name what starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slimx.cluster.starting import Starting, start_deadline, weight_bytes
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.extras.planner.rules.machine import start_warnings
from slimx.models.families import read_model
from tests.refusals import numbers

ROOT = Path(__file__).parents[3]


def config_of(model: Path, **sections: Any) -> Config:
    base = {"run": {"dir": "r"}, "model": {"path": str(model)}, "rollout": {"prompts": "p"}}
    return Config.model_validate(base | sections)


def sized(file: Path, gb: float) -> Path:
    """Returns the directory of a file of `gb` GB, none of them on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as empty:
        empty.truncate(int(gb * 1e9))
    return file.parent


def test_a_start_on_gpus_has_the_time_to_read_the_weights_and_to_compile(tmp_path: Path) -> None:
    model = sized(tmp_path / "model" / "model-1.safetensors", 300)
    sized(model / "model-2.safetensors", 170)
    config = config_of(model)
    assert start_deadline(config, "cpu") == 300
    assert start_deadline(config, "cuda") == 600 + 470
    assert start_deadline(config_of(tmp_path / "nowhere"), "cuda") == 600
    assert start_deadline(config_of(model, cluster={"start_deadline": 20}), "cuda") == 20


def test_every_directory_that_is_read_counts_once(tmp_path: Path) -> None:
    model = sized(tmp_path / "model" / "model.safetensors", 4)
    copy = sized(tmp_path / "fp8" / "model.safetensors", 2)
    megatron = sized(tmp_path / "megatron" / "iter_0000001" / "__0_0.distcp", 8).parent
    judge = sized(tmp_path / "judge" / "model.safetensors", 1)
    groups = [
        {"name": "a"},
        {"name": "b", "model": str(copy), "count": 2},
        {"name": "judge", "frozen": True, "model": str(judge)},
        {"name": "far", "frozen": True, "urls": ["http://127.0.0.1:30000"]},
    ]
    rollout = {"prompts": "p", "engines": groups}
    config = config_of(model, rollout=rollout, trainer={"load": str(megatron)})
    assert weight_bytes(config) == 15e9
    assert weight_bytes(config_of(model, rollout=rollout)) == 7e9
    evaluation = {"prompts": "h", "engines": [{"model": str(sized(tmp_path / "int4" / "model.safetensors", 16))}]}
    assert weight_bytes(config_of(model, rollout=rollout, eval=evaluation)) == 23e9


@pytest.mark.parametrize(("deadline", "warned"), [(900, True), (1100, False), ("null", False)])
def test_a_deadline_that_a_first_start_may_miss_is_warned_of(deadline: Any, warned: bool) -> None:
    config = load_config(ROOT / "configs/moe/qwen3-235b-a22b.yaml", [f"cluster.start_deadline={deadline}"])
    spec = read_model(ROOT / config.model.path)
    found = list(start_warnings(config, spec, "cuda"))
    assert len(found) == warned and not list(start_warnings(config, spec, "cpu"))
    assert all({900, 1070, 470} <= {*numbers(sentence)} for sentence in found)


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
