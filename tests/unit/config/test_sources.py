"""A configuration comes from a file, a mapping or another configuration, and changes come as texts or as a mapping."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.config.rule import Refusal
from tests.refusals import refused

LEAST = {"run.dir": "r", "model": {"path": "m"}, "rollout": {"prompts": "p"}, "checkpoint.every": 20}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("run: {dir: r}\nmodel: {path: m}\nrollout: {prompts: p}\ncheckpoint: {every: 20}\n")
    return path


def test_a_mapping_is_what_a_file_is(file: Path):
    assert load_config(LEAST) == load_config(file)
    nested = {"run": {"dir": "r"}, "model.path": "m", "rollout.prompts": "p", "checkpoint": {"every": 20}}
    assert load_config(nested) == load_config(file)


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.steps=3", "trainer.optimizer.lr=1e-7", "eval.prompts={a: f}"],
        {"schedule.steps": 3, "trainer.optimizer.lr": 1e-7, "eval.prompts": {"a": "f"}},
        {"schedule": {"steps": 3}, "trainer": {"optimizer": {"lr": 1e-7}}, "eval": {"prompts": {"a": Path("f")}}},
    ],
)
def test_overrides_are_texts_or_nested_or_dotted_keys(file: Path, overrides):
    changed = load_config(file, overrides)
    assert (changed.schedule.steps, changed.trainer.optimizer.lr, changed.eval.files) == (3, 1e-7, {"a": "f"})
    assert load_config(file, "schedule.steps=3").schedule.steps == 3


@pytest.mark.parametrize("overrides", [{5: 3}, ("schedule.steps=3", {"run.name": "x"}), [Path("f")], {("a", "b"): 1}])
def test_overrides_that_are_not_strings_are_refused(file: Path, overrides):
    with refused("config.override"):
        load_config(file, overrides)
    if isinstance(overrides, dict):
        with refused("config.override"):
            load_config(overrides)


@pytest.mark.parametrize("text", ["null", "1e3", "true", "a: b", "é\n'\"", "\U0001f600"])
def test_a_text_of_a_mapping_stays_a_text(file: Path, text: str):
    assert load_config(file, {"run.name": text}).run.name == text


def test_a_configuration_is_changed_into_another(file: Path):
    before = load_config(file, {"rollout.group_size": 4, "algorithm.name": "gspo"})
    after = load_config(before, {"schedule.steps": 3, "rollout.engines.0.tensor": 2})
    assert (after.schedule.steps, after.rollout.group_size, after.rollout.engines[0].tensor) == (3, 4, 2)
    assert before.schedule.steps != 3 and load_config(before) == before
    assert load_config(before, {"algorithm.name": "grpo"}) == load_config(file, {"rollout.group_size": 4})


def test_another_preset_replaces_the_values_of_the_first_alone(file: Path):
    first = load_config(file, {"algorithm.name": "gspo", "algorithm.loss.high": 0.7})
    second = load_config(first, {"algorithm.name": "grpo"})
    assert second == load_config(file, {"algorithm": {"name": "grpo", "loss": {"high": 0.7}}})


def test_secrets_stay_unresolved_in_a_changed_configuration(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NAME_OF_RUN", "secret")
    before = load_config(file, {"run.name": "${oc.env:NAME_OF_RUN}"})
    after = load_config(before, {"schedule.steps": 3})
    assert after.run.name == "secret" and "secret" not in json.dumps(after.to_plain())


@pytest.mark.parametrize(
    ("source", "overrides", "code", "about"),
    [
        (LEAST, {"schedule.step": 3}, "config.unknown_key", "schedule.step"),
        (LEAST | {"run.nmae": "a"}, {}, "config.unknown_key", "run.nmae"),
        (LEAST, {"schedule": {"steps": "many"}}, "config.value", "schedule.steps"),
        ({}, {}, "config.missing_key", "run"),
    ],
)
def test_a_wrong_mapping_is_refused_in_one_sentence(source, overrides, code, about):
    with refused(code, about=about) as caught:
        load_config(source, overrides)
    error: BaseException = caught.value
    assert isinstance(error, Refusal) and error.__cause__ is None and error.__suppress_context__


def test_a_function_among_overrides_is_refused(file: Path):
    with refused("config.override", about="builtin_function_or_method"):
        load_config(file, {"reward.function": len})
    assert load_config(file, {"run.dir": Path("runs/a")}).run.dir == "runs/a"


def test_a_mapping_inside_itself_is_refused():
    deep: dict[str, object] = {}
    for _ in range(20_000):
        deep = {"a": deep}
    with refused("config.depth", about="configuration"):
        load_config({"run": deep})
