"""The refusal of an unknown key names the key that was meant, in the form in which it can be written in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slimx.commands.usage import RunCommand
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.suggestions import for_flag, known_keys
from slimx.errors import SlimxError
from slimx.extras.foreign.find import FLAGS, PATHS
from slimx.extras.foreign.meaning import Meaning
from slimx.extras.foreign.values import VALUES
from tests.refusals import refused

BASE = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}


def written(directory: Path, **sections: object) -> Path:
    (directory / "run.yaml").write_text(yaml.safe_dump(BASE | sections))
    return directory / "run.yaml"


def entries(found: str | Meaning) -> list[Meaning]:
    """Returns the entry and those that its values lead to."""
    if isinstance(found, str):
        return [Meaning(found)]
    return [
        found,
        *(entry for value in found.values.values() if isinstance(value, Meaning) for entry in entries(value)),
    ]


NAMES = {name: entry for table in [*FLAGS, *PATHS] for name, found in table.items() for entry in entries(found)}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_foreign_name_leads_to_keys_or_to_a_reason_and_is_no_key(name):
    keys = known_keys(Config)
    for table in [*FLAGS, *PATHS]:
        for found in entries(table.get(name, [])) if name in table else []:
            named = [*found.sets, *([found.key] if found.key not in ("", "{}") else [])]
            assert named or found.note or found.key == "{}" or found.closed, name
            for key in named:
                whole = key.removesuffix(".{}").removesuffix(".*")
                inside = "sglang" in key or "megatron" in key or "options" in key
                assert whole in keys or any(other.startswith(f"{whole}.") for other in keys) or inside, (name, key)
    assert name not in keys and name == name.lower() and "-" not in name.replace("{}", ""), name


@pytest.mark.parametrize("key", VALUES)
def test_foreign_values_lead_to_values_that_their_keys_accept(tmp_path, key):
    assert key in known_keys(Config)
    file = written(tmp_path)
    for word, value in VALUES[key].items():
        with pytest.raises(SlimxError) as caught:
            load_config(file, [f"{key}={word}"])
        assert caught.value.about == key, (word, caught.value)
        if isinstance(value, str):
            assert f"did you mean {value}?" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("trainer.lr=0.5", "trainer.optimizer.lr=0.5"),
        ("critic.lr=0.5", "critic.optimizer.lr=0.5"),
        ("rollout.n=8", "rollout.group_size=8"),
        ("rollout.temperature=0.8", "rollout.sampling.temperature=0.8"),
        ("resume=never", "run.resume=never"),
        ("trainer.learning_rate=0.5", "trainer.optimizer.lr=0.5"),
        ("actor_rollout_ref.rollout.n=4", "rollout.group_size=4"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=4", "rollout.engines.0.tensor=4"),
        ("trainer.total_epochs=3", "schedule.steps"),
        ("trainer.wrold_size=2", "trainer.world_size"),
    ],
)
def test_an_invalid_override_is_refused_with_the_override_to_write(tmp_path, override, suggestion):
    with refused("config.unknown_key", about=override.partition("=")[0]) as caught:
        load_config(written(tmp_path), [override])
    assert (
        suggestion in str(caught.value) and repr(override) in str(caught.value) and "run.yaml" not in str(caught.value)
    )


@pytest.mark.parametrize(
    ("override", "unknown", "meant"),
    [
        ("evaluate.every=3", "evaluate", "eval"),
        ("train.lr=1", "train", "trainer"),
        ("run.directory=r", "run.directory", "run.dir"),
        ("rollout.prompt_per=1", "rollout.prompt_per", "rollout.prompts_per_step"),
    ],
)
def test_the_start_or_an_extension_of_a_name_means_that_name(tmp_path, override, unknown, meant):
    with refused("config.unknown_key", about=unknown) as caught:
        load_config(written(tmp_path), [override])
    assert f"did you mean {meant}?" in str(caught.value)


def test_a_section_is_not_suggested_as_the_value_of_a_number(tmp_path):
    with refused("config.unknown_key", about="data") as caught:
        load_config(written(tmp_path), ["data.train=/prompts.jsonl"])
    assert "trainer.data" not in str(caught.value)


def test_a_foreign_key_in_a_file_is_answered_with_the_line_to_write(tmp_path):
    file = written(tmp_path, trainer={"lr": 0.5}, data={"train_batch_size": 64})
    with refused("config.unknown_key") as caught:
        load_config(file, ["run.seed=3"])
    message = str(caught.value)
    assert "`trainer: {optimizer: {lr: 0.5}}`" in message and "`rollout: {prompts_per_step: 64}`" in message
    assert message.startswith(str(file)) and "run.seed" not in message


def test_a_reported_line_number_exists_in_the_file(tmp_path):
    with refused("config.unknown_key") as caught:
        load_config(written(tmp_path, actor_rollout_ref={"rollout": {"tensor_model_parallel_size": 4}}))
    line = yaml.safe_load(str(caught.value).split("`")[1])
    line["rollout"] |= BASE["rollout"]
    assert load_config(written(tmp_path, **line)).rollout.engines[0].tensor == 4


def test_mistakes_in_file_and_overrides_are_each_blamed_on_their_place(tmp_path):
    file = written(tmp_path, run={"dir": "r", "sede": 1})
    with refused("config.unknown_key", about="run.sede") as caught:
        load_config(file, ["trainer.world_size=two"])
    message = str(caught.value)
    assert (
        f"{file}: unknown key run.sede" in message
        and "override 'trainer.world_size=two': trainer.world_size" in message
    )


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--lr", "write trainer.optimizer.lr=7"),
        ("--seed", "write run.seed=7"),
        ("--kl-coef", "write algorithm.kl_reward_coef=7"),
        ("--rollout-batch-size", "write rollout.prompts_per_step=7"),
        ("--trainer.world-size", "write trainer.world_size=7"),
        ("--webhook", "write track.webhook=7"),
        ("--nothing-of-the-kind", None),
    ],
)
def test_flags_of_other_frameworks_are_refused_with_the_slimx_key(flag, expected):
    assert for_flag(Config, flag, "7") == expected


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        (["run.yaml", "--lr", "1e-6"], "--lr", "1e-6"),
        (["--n-samples-per-prompt=8", "run.yaml"], "--n-samples-per-prompt", "8"),
        (["run.yaml", "--use-wandb", "--debug"], "--use-wandb", "true"),
    ],
)
def test_a_command_refuses_a_foreign_flag_by_name_and_value(arguments, flag, value):
    with refused("cli.foreign_flag", about=flag) as caught:
        RunCommand("train", callback=print).make_context("train", arguments)
    assert f"={value}" in str(caught.value)


@pytest.mark.parametrize("flag", ["--config", "--config-file", "--yaml"])
def test_a_flag_for_the_file_is_answered_with_its_place(flag):
    with refused("cli.foreign_flag", about=flag) as caught:
        RunCommand("train", callback=print).make_context("train", [flag, "run.yaml"])
    assert "first argument" in str(caught.value)
