"""Overrides of single entries of lists, and of whole sections by null; inputs that are repeated only in part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx.config.load import load_config
from slimx.config.section import ECHOED
from slimx.errors import SlimxError
from tests.refusals import numbers, refused

BASE = {
    "run": {"dir": "r"},
    "model": {"path": "m"},
    "rollout": {"prompts": "p", "engines": [{"name": "a", "max_total_tokens": 99}]},
    "eval": {"prompts": "h", "every": 5},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("key", ["rollout.engines.0.tensor", "rollout.engines[0].tensor"])
def test_one_entry_of_a_list_takes_a_key_and_keeps_the_others(file, key):
    (group,) = load_config(file, [f"{key}=2"]).rollout.engines
    assert (group.name, group.max_total_tokens, group.tensor) == ("a", 99, 2)


def test_an_index_behind_the_last_adds_an_entry_with_defaults(file):
    config = load_config(file, ["rollout.engines.1.name=b", "trainer.optimizer.betas.0=0.8"])
    assert [group.name for group in config.rollout.engines] == ["a", "b"]
    assert config.trainer.optimizer.betas == (0.8, 0.95)
    with refused("config.entry", about="rollout.engines.4"):
        load_config(file, ["rollout.engines.4.name=b"])


@pytest.mark.parametrize(
    ("override", "about", "found"),
    [
        ("rollout.engines.a.tensor=2", "rollout.engines", [2, 1, 0]),
        ("rollout.engines.-1.tensor=2", "rollout.engines", [1, 0]),
        ("rollout.engines={}", "rollout.engines", [1, 0]),
        ("policies.judge.engines.j.tensor=2", "policies.judge.engines", [2, 2, 0]),
        ("trainer.optimizer.betas.first=1", "trainer.optimizer.betas", [1, 2, 0]),
    ],
)
def test_a_key_that_is_no_index_of_a_list_is_told_the_number_of_its_entries(file, override, about, found):
    base = load_config(file, ["policies={judge: {engines: [{name: j}, {name: k}]}}", "publish.transport=memory"])
    with refused("config.override", about=about) as caught:
        load_config(base, [override])
    assert numbers(caught.value)[-len(found) :] == found


@pytest.mark.parametrize(
    ("override", "about"),
    [
        ("rollout.engines.tensor=2", "rollout.engines"),
        ("rollout.engines={tensor: 2}", "rollout.engines"),
        ("rollout.engines=2", "rollout.engines"),
        ("eval.engines=actor", "eval.engines"),
        ("policies.judge.engines=big", "policies.judge.engines"),
        ("eval.pass_at=4", "eval.pass_at"),
        ("~eval", "~eval"),
        ("~trainer.lora", "~trainer.lora"),
    ],
)
def test_what_an_override_is_told_to_write_is_accepted(file, override, about):
    base = load_config(file, {"eval.samples": 4, "eval.temperature": 1, "publish.transport": "memory"})
    if about.startswith("policies"):
        base = load_config(base, {"policies.judge": {}})
    with pytest.raises(SlimxError) as caught:
        load_config(base, [override])
    assert caught.value.about == about
    (advice,) = re.findall("write '?([^']+)'?$", str(caught.value))
    load_config(base, [advice])


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["rollout.sampling.stop_token_ids+=5"], "rollout.sampling.stop_token_ids", (5,)),
        (["rollout.sampling.stop_token_ids+=[5, 6]"], "rollout.sampling.stop_token_ids", (5, 6)),
        (["rollout.sampling.stop_token_ids=[4]", "rollout.sampling.stop_token_ids+=5"],
         "rollout.sampling.stop_token_ids", (4, 5)),
        (["trainer.recompute.modules+=moe"], "trainer.recompute.modules", ("core_attn", "moe")),
        (["trainer.layers_per_stage=null", "trainer.layers_per_stage+=2"], "trainer.layers_per_stage", (2,)),
        (["rollout.options={tags: [a]}", "rollout.options.tags+=b"], "rollout.options", {"tags": ["a", "b"]}),
    ],
)  # fmt: skip
def test_a_list_is_extended_from_the_command_line(file, overrides, key, value):
    found = load_config(file, overrides)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_an_appended_entry_may_have_other_names_and_keeps_the_others(file):
    config = load_config(file, ["rollout.engines+={name: b, tensor_parallel_size: 2}", "rollout.engines.1.count=3"])
    groups = [(group.name, group.tensor, group.count, group.max_total_tokens) for group in config.rollout.engines]
    assert groups == [("a", 1, 1, 99), ("b", 2, 3, None)]


@pytest.mark.parametrize("key", ["schedule.steps", "rollout", "rollout.engnes", "rollout.options", "eval.prompts"])
def test_only_lists_are_extended(file, key):
    with refused("config.override", about=key):
        load_config(file, [f"{key}+=3"])


@pytest.mark.parametrize("override", ["eval=null", "eval.prompts=null", "eval.every=0"])
def test_evaluation_is_switched_off(file, override):
    assert load_config(file).eval.files == {"": "h"}
    assert load_config(file, [override]).eval.files == {}


def test_evaluation_is_switched_off_in_the_file(file):
    file.write_text(yaml.safe_dump(BASE | {"eval": None}))
    assert load_config(file).eval.files == {} and load_config(file, ["eval.prompts=h"]).eval.files == {"": "h"}


def test_an_interval_without_any_prompts_is_still_refused(file):
    file.write_text(yaml.safe_dump(BASE | {"eval": {"every": 5}}))
    with refused("eval.prompts", about="eval.every"):
        load_config(file)


@pytest.mark.parametrize("override", ["x" * 5000 + "=1", "trainer.load." + "y" * 5000 + "=1", "z" * 5000])
def test_a_long_input_is_repeated_in_part(file, override):
    with pytest.raises(SlimxError) as caught:
        load_config(file, [override])
    assert override[:50] in str(caught.value) and len(str(caught.value)) < 5 * ECHOED


def test_a_file_that_is_no_configuration_is_not_repeated(tmp_path):
    (tmp_path / "big.txt").write_text("word " * 80_000)
    with refused("config.no_sections") as caught:
        load_config(tmp_path / "big.txt")
    assert len(str(caught.value)) < 5 * ECHOED


FULL = """
run: {dir: d}
model: {path: m}
rollout:
  prompts: p.jsonl
  options: {a: 1}
  template: {a: 1}
  engines: [{sglang: {a: 1}}, {name: b, urls: ["http://127.0.0.1:1"]}]
  sampling: {stop_token_ids: [1]}
reward: {options: {a: 1}}
trainer: {megatron: {a: 1}, freeze: [a]}
eval: {prompts: {a: p.jsonl}, pass_at: [1]}
"""
MAPPINGS = (
    "rollout.options",
    "rollout.template",
    "rollout.engines.0.sglang",
    "reward.options",
    "trainer.megatron",
    "eval.prompts",
)
LISTS = ("rollout.engines.1.urls", "rollout.sampling.stop_token_ids", "trainer.freeze", "eval.pass_at")


@pytest.mark.parametrize(
    "override",
    [
        *(f"{key}={{}}" for key in MAPPINGS),
        *(f"{key}=null" for key in MAPPINGS),
        *(f"{key}=[]" for key in LISTS),
        *(f"{key}=null" for key in LISTS),
    ],
)
def test_a_mapping_and_a_list_are_emptied_from_the_command_line(tmp_path, override):
    (tmp_path / "run.yaml").write_text(FULL)
    value: Any = load_config(tmp_path / "run.yaml", [override]).model_dump()
    for part in override.partition("=")[0].split("."):
        value = value[int(part) if part.isdigit() else part]
    assert not value


def test_an_emptied_mapping_takes_new_keys_a_section_its_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text(FULL)
    config = load_config(tmp_path / "run.yaml", ["rollout.options={}", "rollout.options.b=2", "rollout.sampling={}"])
    assert config.rollout.options == {"b": 2} and config.rollout.sampling.stop_token_ids == ()
    with refused("config.value", about="trainer.freeze.0"):
        load_config(tmp_path / "run.yaml", ["trainer.freeze.0=null"])
