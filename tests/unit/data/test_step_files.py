"""A file per step: what a run trained on can be looked at afterwards, and damage or a wrong origin is named."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from slimx.cli import app
from slimx.config.schema import Config
from slimx.data.records import Group, Trajectory
from slimx.data.saved.codec import encode_groups
from slimx.data.saved.step_files import (
    StepFiles,
    file_name,
    origin_of,
    read_step,
    read_step_about,
    step_files,
    without_routes,
)
from slimx.data.saved.trained_tokens import SUFFIX, TrainedTokens, read_trained
from slimx.orchestration.state.saves import RunState, Saves
from slimx.rollout.hooks import RewardContext
from tests.refusals import numbers, refused
from tests.unit.rollout.rollout_stand import Stand, config_of, one, the_tokenizer


async def by_length(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """Returns rewards that differ between the rollouts of a group."""
    ctx.log("hits", 2)
    return {"first": float(trajectory.sampled_ids()[0] % 2), "second": 0.25}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = tmp_path_factory.mktemp("model")
    the_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 100, "dtype": "float32"}))
    config = config_of()
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})


@pytest.fixture(scope="module")
def groups(config: Config) -> list[Group]:
    """Returns four groups of two, sampled at version 3, one of them between 3 and 4; all with routes."""

    async def made() -> list[Group]:
        async with Stand(config, reward=by_length) as stand:
            stand.publish(3)
            return (await stand.next_batch()).groups

    out = asyncio.run(made())
    spans = out[1].trajectories[1].spans
    out[1].trajectories[1].spans = [spans[0], replace(spans[1], stop=spans[1].stop - 1, version=3)]
    out[1].trajectories[1].spans.append(replace(spans[1], start=spans[1].stop - 1, version=4))
    for group in out:
        for trajectory in group.trajectories:
            trajectory.routed_experts = np.zeros((len(trajectory.token_ids) - 1, 2, 2), np.uint8)
    return out


def files_of(directory: Path, config: Config, *, keep: int = 0, resume_step: int = 0, **changes: Any) -> StepFiles:
    origin = replace(origin_of(config, the_tokenizer()), **changes)
    return StepFiles(directory, origin, every=1, keep=keep, resume_step=resume_step)


def test_a_step_comes_back_bit_for_bit_and_its_line_says_what_it_holds(config, groups, tmp_path):
    path = files_of(tmp_path, config, routes=True).write(5, 4, groups, {"filter: flat": 2})
    about, found = read_step(path)
    assert encode_groups(found) == encode_groups(groups)
    assert (about.step, about.version, about.oldest, about.groups, about.trajectories) == (5, 4, 3, 4, 8)
    assert about.sampled_tokens == 24 and about.truncated == 0 and about.dropped == {"filter: flat": 2}
    assert about.reward == pytest.approx(np.mean([t.reward for group in groups for t in group.trajectories]))
    lean = files_of(tmp_path, config).write(6, 5, groups, {})
    assert encode_groups(read_step(lean)[1]) == encode_groups(without_routes(groups))
    assert groups[0].trajectories[0].routed_experts is not None


def test_only_the_newest_files_stay_and_a_resume_removes_its_steps(config, groups, tmp_path):
    files = files_of(tmp_path, config, keep=3)
    for step in range(1, 6):
        files.write(step, step - 1, groups[:1], {})
    assert list(step_files(tmp_path)) == [3, 4, 5]
    files_of(tmp_path, config, resume_step=4)
    assert list(step_files(tmp_path)) == [3]
    every = StepFiles(tmp_path, files.origin, every=3, keep=0, resume_step=9)
    assert [step for step in range(1, 9) if every.due(step)] == [1, 4, 7]
    assert not any(StepFiles(tmp_path, files.origin, every=0, keep=0, resume_step=9).due(step) for step in range(9))


def test_a_damaged_file_is_named(config, groups, tmp_path):
    path = files_of(tmp_path, config).write(1, 0, groups, {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with refused("data.truncated", about=str(path)):
        read_step_about(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    read_step_about(path)  # without reading the groups
    with refused("data.checksum", about=str(path)):
        read_step(path)
    path.write_bytes(whole.replace(b'"oldest"', b'"eldest"'))
    with refused("data.header"):
        read_step_about(path)


def test_the_origin_of_rollouts_is_compared_clause_by_clause(config):
    here = origin_of(config, the_tokenizer())
    assert here.differences(here) == {} and "dtype" not in here.model
    other = replace(here, model={**here.model, "hidden_size": 16}, group_size=4, max_staleness=1)
    differences = other.differences(here)
    assert list(differences) == ["config.json", "rollout.group_size", "schedule.max_staleness"]
    values = [re.findall(r"\d+", clause) for clause in differences.values()]
    assert values == [["16", "8"], ["4", "2"], ["1", "0"]], "there and here"
    assert "hidden_size" in differences["config.json"]
    assert list(replace(here, vocabulary="x").differences(here)) == ["vocabulary"]


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(config: Config, groups: list[Group], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with steps 1 and 2, a checkpoint with what waits, and dropped groups."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    files = files_of(directory / "rollouts", config)
    files.write(1, 3, groups[:3], {"filter: flat": 1})
    files.write(2, 4, groups[3:], {})
    lines = [
        {"step": 1, "prompt": "p3", "reason": "filter: flat", "detail": None},
        {"step": 2, "prompt": "p9", "reason": "generate failed", "detail": "no tool"},
    ]
    (directory / "dropped.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def waiting() -> dict[str, Any]:
        stand = Stand(config, reward=one)
        async with stand:
            await stand.next_batch()
            stand.manager.admit()
            return stand.manager.state()

    saves = Saves(directory / "checkpoints", keep=1)
    state = RunState(2, 2, {}, asyncio.run(waiting()))
    saves.commit(saves.begin(2), state.files(), {})
    return directory


def shown(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_text_of_models_and_agents_cannot_control_the_terminal(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    line = {"step": 2, "prompt": "p9\x1b[2J", "reason": "generate failed", "detail": "\x1b]0;x\x07\x9b1m\u202e[bold]"}
    (tmp_path / "run" / "dropped.jsonl").write_text(json.dumps(line) + "\n")
    text = shown(tmp_path / "run", "--dropped")
    assert "[bold]" in text and "\\u001b" in text
    assert not [letter for letter in text if letter in "\x1b\x07\x9b\u202e"]


def test_without_a_step_there_is_a_line_for_each(run):
    head, first, second = shown(run).splitlines()
    assert head.split()[:3] == ["step", "version", "groups"]
    assert first.split()[:6] == ["1", "3", "3", "6", "0", "18"] and first.endswith("1 filter: flat")
    assert second.split()[:3] == ["2", "4", "1"] and second.split()[-1] == "0"


def test_a_step_shows_prompts_texts_rewards_with_parts_and_versions(run, groups):
    text = shown(run, "--step", 1)
    group = groups[1]
    (head,) = (line for line in text.splitlines() if line.startswith(f"group {group.id}, "))
    assert group.prompt.id in head and repr(group.prompt.answer) in head and numbers(head)[-2] == 2
    assert f"? user: {group.prompt.messages[0]['content']}" in text
    last = group.trajectories[1]
    answer = the_tokenizer().decode(last.sampled_ids()[:2].tolist())
    assert "version 3+4, staleness 0" in text and f"> {answer}" in text
    (line,) = (line for line in text.splitlines() if line.strip().startswith(last.id))
    fragments = (f"{last.reward:.3f}", f"first {last.reward_parts['first']:.3f}", "second 0.250", "hits 2.000")
    assert all(part in line for part in fragments)


def test_json_has_every_token_and_choices_narrow_it(run, groups):
    found = json.loads(shown(run, "--step", 1, "--group", groups[1].id, "--tokens", "--json"))
    (group,), (_, last) = found["groups"], groups[1].trajectories
    tokens = group["trajectories"][1]["each_token"]
    assert [token["id"] for token in tokens] == last.token_ids.tolist()
    assert [token["trained"] for token in tokens] == last.loss_mask.astype(bool).tolist()
    assert [token["version"] for token in tokens] == [None if v < 0 else v for v in last.versions().tolist()]
    assert [token["logprob"] for token in tokens[-3:]] == [-1.0] * 3 and tokens[0]["logprob"] is None
    low = [t.id for g in groups[:3] for t in g.trajectories if t.reward < 1]
    found = json.loads(shown(run, "--step", 1, "--reward-below", 1, "--json"))
    assert [t["id"] for group in found["groups"] for t in group["trajectories"]] == low
    assert len(json.loads(shown(run, "--step", 1, "--limit", 1, "--json"))["groups"]) == 1
    *_, more = shown(run, "--step", 1, "--limit", 1).splitlines()
    assert numbers(more)[0] == 2 and "--limit 0" in more
    assert "position" in shown(run, "--step", 1, "--tokens", "--limit", 1)


def test_the_buffer_is_what_the_newest_checkpoint_holds(run):
    found = json.loads(shown(run, "--buffer", "--json"))
    assert found["step"] == 2 and [ticket["number"] for ticket in found["waiting"]] == [4, 5, 6, 7]
    text = shown(run, "--buffer")
    head, first, *_ = text.splitlines()
    assert "iter_0000002" in head and numbers(head)[-3:] == [2, 0, 4], "the step; groups that are complete and are not"
    assert "unfinished group 4, prompt" in first and numbers(first)[-2:] == [0, 0], "rollouts, and tokens of others"


def test_dropped_groups_are_counted_by_reason(run):
    text = shown(run, "--dropped").splitlines()
    assert numbers(text[0]) == [2]
    assert any(all(part in line for part in ("step 2", "p9", "generate failed", "no tool")) for line in text[1:])
    assert json.loads(shown(run, "--dropped", "--step", 1, "--json"))["reasons"] == {"filter: flat": 1}


@pytest.mark.parametrize(
    ("arguments", "code", "about"),
    [
        (["--step", 7], "rollouts.step", "step 7"),
        (["--step", 1, "--group", "g77"], "rollouts.group", "g77"),
        (["--tokens"], "rollouts.options", "--step"),
        (["--buffer", "--step", 1], "rollouts.options", "--buffer"),
        (["--step", 1, "--limit", -1], "rollouts.limit", "--limit"),
    ],
)
def test_missing_recordings_are_refused_in_one_sentence(run, arguments, code, about):
    with refused(code, about=about) as caught:
        shown(run, *arguments)
    assert "\n" not in str(caught.value)


def test_directories_without_a_run_or_without_rollouts_are_named(run, tmp_path):
    with refused("run.none", about=str(tmp_path)):
        shown(tmp_path)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with refused("rollouts.empty", about=str(tmp_path / "rollouts")):
        shown(tmp_path, "--step", 1)
    with refused("rollouts.buffer", about=str(tmp_path)):
        shown(tmp_path, "--buffer")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / file_name(1)).write_bytes(b"{}\n")
    assert [line for line in shown(tmp_path).splitlines() if "step-0000001.groups: " in line]


def trained_of(groups: list[Group], *, routes: bool) -> list[TrainedTokens]:
    generator = np.random.default_rng(1)
    return [
        TrainedTokens(
            logprobs=generator.normal(size=len(trajectory.token_ids)).astype(np.float32),
            advantages=generator.normal(size=len(trajectory.token_ids)).astype(np.float32),
            other_experts=generator.integers(2, size=len(trajectory.token_ids)).astype(bool) if routes else None,
        )
        for group in groups
        for trajectory in group.trajectories
    ]


@pytest.mark.parametrize("routes", [True, False])
def test_values_of_trained_tokens_return_by_trajectory(config, groups, tmp_path, routes):
    files = files_of(tmp_path, config, keep=1)
    first = files.write(1, 0, groups, {})
    assert read_trained(first, groups) == {}, "it has not been trained"
    trained = trained_of(groups, routes=routes)
    files.write_trained(1, trained)
    found = read_trained(first, groups)
    assert list(found) == [trajectory.id for group in groups for trajectory in group.trajectories]
    for written, back in zip(trained, found.values(), strict=True):
        assert np.array_equal(written.logprobs, back.logprobs) and np.array_equal(written.advantages, back.advantages)
        assert np.array_equal(written.other_experts, back.other_experts) if routes else back.other_experts is None
    if routes:  # of some rollouts engines return none
        some = [
            replace(values, other_experts=None if n % 2 else values.other_experts) for n, values in enumerate(trained)
        ]
        files.write_trained(1, some)
        back = list(read_trained(first, groups).values())
        assert [values.other_experts is None for values in back] == [n % 2 == 1 for n in range(len(back))]
    files.write(2, 1, groups, {})
    files.write_trained(2, trained)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002.groups", "step-0000002.tokens"]
    files_of(tmp_path, config, resume_step=2)
    assert not list(tmp_path.iterdir()), "a resumed run trains the step anew"


@pytest.mark.parametrize("damage", ["cut", "another step's", "a number"])
def test_damaged_values_of_trained_tokens_are_refused(config, groups, tmp_path, damage):
    files = files_of(tmp_path, config)
    file = files.write(1, 0, groups, {})
    path = files.write_trained(1, trained_of(groups[1:] if damage == "another step's" else groups, routes=True))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif damage == "a number":
        path.write_bytes(b"12345678")
    with refused("data.trained", about=str(file.with_suffix(SUFFIX))):
        read_trained(file, groups)
