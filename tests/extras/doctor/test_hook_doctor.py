"""`slimx doctor FILE --hooks` names what is wrong with a hook in one sentence, before anything is started."""

from __future__ import annotations

import dataclasses
import json
import runpy
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slimx.cli import app
from slimx.config.load import load_config
from slimx.data.records import Group, Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.extras.doctor.hooks import trial as hook_trial
from slimx.extras.doctor.hooks.doctor import HookFindings, examine_hooks
from slimx.rollout.hooks import RewardContext, RolloutContext
from tests.refusals import numbers

HOOKS = __name__
"""Where the hooks below are: wrong in one way each, and some that are right."""
TOOL = Path(__file__).resolve().parents[3] / "slimx/extras/quickstart" / "make_model.py"


async def good(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    return draft.finish(metadata={"fine": [1, "x"]})


async def calling(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Calls a tool for each sum that the model writes, and inserts the result as one token."""
    draft = ctx.draft(prompt)
    for turn in range(4):
        completion = await ctx.engine.generate(draft.token_ids, turn=turn)
        draft.add_sampled(completion)
        if "+" not in ctx.tokenizer.decode(completion.token_ids):
            break
        draft.add_inserted([5])
    return draft.finish()


async def streaming(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    async with ctx.engine.stream(draft.token_ids) as stream:
        async for _ in stream:
            pass
    draft.add_sampled(stream.completion)
    return draft.finish()


async def untrained(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids), train=False)
    return draft.finish()


async def without_logprobs(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    trajectory = await good(ctx, prompt)
    trajectory.logprobs[:] = float("nan")
    return trajectory


async def long_prompt(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft([*([5] * 70), *ctx.draft(prompt).token_ids])
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    return draft.finish()


async def endless_trajectory(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    for turn in range(3):
        draft.add_inserted([5] * 4000)
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=turn))
    return draft.finish()


async def unsaveable(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    return dataclasses.replace(await good(ctx, prompt), metadata={"agent": object()})


async def raising(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    raise KeyError("tool")


async def strange(ctx: RolloutContext, prompt: Prompt) -> Any:
    return "an answer"


async def one_seed(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    for _ in range(2):
        draft.add_sampled(await ctx.engine.generate(draft.token_ids))
        draft.add_inserted([5])
    return draft.finish()


async def holding(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    time.sleep(0.8)
    return await good(ctx, prompt)


async def stuck(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    time.sleep(30)
    return await good(ctx, prompt)


async def unknown_parameter(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, {"min_p": 0.1}))
    return draft.finish()


async def right(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    return {"right": float(ctx.text.strip() == ctx.prompt.answer), "form": 0.5}


async def constant(ctx: RewardContext, trajectory: Trajectory) -> float:
    return 0.25


async def none(ctx: RewardContext, trajectory: Trajectory) -> Any:
    return None


async def asks_judge(ctx: RewardContext, trajectory: Trajectory) -> float:
    verdict = await ctx.engines["judge"].chat([{"role": "user", "content": ctx.text}])
    return float(verdict.removeprefix("Points: "))


async def asks_by_hand(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Blocks on the engines' address: answered all the same."""
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{ctx.address}/generate", body), timeout=300).read()
    return await good(ctx, prompt)


def drop(group: Group) -> str:
    return "no signal"


def strange_keep(group: Group) -> Any:
    return {"keep": True}


def raising_keep(group: Group) -> bool:
    raise ValueError("no rewards")


def user_loss(inputs: Any) -> Any:
    return inputs.logprobs


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the YAML file of a run of a tiny MoE model with correct hooks."""
    folder = tmp_path_factory.mktemp("run")
    runpy.run_path(str(TOOL))["make_model"](folder / "model", seed=1)
    lines = [{"messages": [{"role": "user", "content": "12+34="}], "answer": "46", "id": "first"}] * 1
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "rollout": {
            "prompts": str(folder / "prompts.jsonl"),
            "generate": f"{HOOKS}.good",
            "max_prompt_tokens": 64,
            "group_size": 8,
        },
        "reward": {"function": f"{HOOKS}.right"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def examine(run_file: Path, *overrides: str) -> HookFindings:
    return examine_hooks(load_config(run_file, list(overrides)))


def test_hooks_that_are_right_are_tried_and_shown(run_file):
    result = CliRunner().invoke(app, ["doctor", str(run_file), "--hooks"])
    assert result.exit_code == 0, result.output
    assert "problem" not in result.output and "note" not in result.output
    rows = [line.split() for line in result.output.splitlines() if "completed" in line or "truncated" in line]
    right, other, cut = (row[row.index(f"{number}/0") + 1 : -1] for number, row in enumerate(rows))
    # A prompt of 8 tokens, "46" and its end; the reward is right + form.
    assert right == ["11", "3", "p8", "s3", "1", "completed", "1.5"]
    length = int(other[1])
    assert other == [f"{8 + length}", f"{length}", "p8", f"s{length}", "1", "completed", "0.5"]
    assert cut == [f"{7 + length}", f"{length - 1}", "p8", f"s{length - 1}", "1", "truncated", "0.5"]
    assert f"rollout.generate       {HOOKS}.good" in result.output


@pytest.mark.parametrize(
    "overrides",
    [
        [f"rollout.generate={HOOKS}.streaming"],
        [f"rollout.generate={HOOKS}.asks_by_hand"],
        ["rollout.generate=examples.debate.generate", "rollout.sampling.top_p=0.9"],
        ["rollout.generate=examples.fan_out.generate", "reward.function=examples.fan_out.reward"],
        [
            "rollout.generate=slime:examples.slime_style.search",
            "rollout.options.turns=2",
            "reward.function=slime:examples.slime_style.right",
            "reward.options.reward_key=score",
        ],
        ["rollout.generate=agent", "rollout.options.agent=examples.openai_agent.solve"],
        [
            "rollout.generate=multi_turn",
            "rollout.options.environment=tests.unit.environments.environment_stand.Counting",
            "rollout.options.environment_processes=1",
            "reward.function=multi_turn",
        ],
    ],
    ids=["stream", "own HTTP", "debate", "fan-out", "slime", "agent", "environment process"],
)
def test_hooks_of_every_kind_work_with_the_scripted_engines(run_file, overrides):
    found = examine(run_file, *overrides)
    assert not found.problems, found.problems


GENERATE = "rollout.generate"
PROBLEMS = [
    ([f"{GENERATE}=no.such.hook"], "dotted.import", GENERATE, ["no.such.hook"]),
    (["rollout.options.retries=3"], "dotted.options", "rollout.options", [f"{HOOKS}.good", "'retries'"]),
    ([f"{GENERATE}={HOOKS}.untrained"], "hooks.untrained", f"{HOOKS}.untrained", []),
    ([f"{GENERATE}={HOOKS}.without_logprobs"], "hooks.failed", "generate failed", ["0/0", "log-prob"]),
    (
        [f"{GENERATE}={HOOKS}.endless_trajectory", "rollout.routed_experts=false"],
        "hooks.long_trajectory",
        f"{HOOKS}.endless_trajectory",
        ["120"],
    ),
    ([f"{GENERATE}={HOOKS}.unsaveable"], "hooks.failed", "generate failed", ["metadata", f"{HOOKS}.unsaveable"]),
    ([f"{GENERATE}={HOOKS}.raising"], "hooks.failed", "generate failed", ["3 of 3", f"{HOOKS}.raising"]),
    ([f"{GENERATE}={HOOKS}.strange"], "hooks.failed", "generate failed", ["str", "Trajectory"]),
    ([f"{GENERATE}={HOOKS}.unknown_parameter"], "hooks.failed", "generate failed", ["min_p"]),
    ([f"reward.function={HOOKS}.none"], "hooks.failed", "reward failed", ["3 of 3", f"{HOOKS}.none", "None"]),
    ([f"rollout.filter={HOOKS}.strange_keep"], "hooks.filter_verdict", "rollout.filter", ["dict"]),
    ([f"rollout.filter={HOOKS}.raising_keep"], "hooks.filter_raised", "rollout.filter", ["ValueError", "no rewards"]),
    ([f"algorithm.loss={HOOKS}.user_loss"], "hook.loss_result", f"{HOOKS}.user_loss", [f"{HOOKS}.user_loss"]),
    (["rollout.prompts=nowhere.jsonl"], "prompts.unreadable", "nowhere.jsonl", []),
    (
        [
            f"reward.parts=[{{name: a, function: {HOOKS}.constant, where: {{dataset: x}}}}]",
            "reward.function=null",
        ],
        "reward.parts",
        "first",
        [],
    ),
]


def found_among(findings: list[SlimxError], code: str, about: str, named: list[str]) -> bool:
    return any(
        (error.code, error.about) == (code, about) and all(name in str(error) for name in named) for error in findings
    )


@pytest.mark.parametrize(("overrides", "code", "about", "named"), PROBLEMS, ids=str)
def test_a_wrong_hook_gives_one_clear_sentence(run_file, overrides, code, about, named):
    found = examine(run_file, *overrides)
    assert found_among(found.problems, code, about, named), found
    assert all("\n" not in str(problem) for problem in found.problems)


NOTES = [
    ([f"{GENERATE}={HOOKS}.long_prompt"], "hooks.long_prompt", f"{HOOKS}.long_prompt", ["78", "64"]),
    ([f"{GENERATE}={HOOKS}.one_seed", "rollout.routed_experts=false"], "hooks.one_seed", f"{HOOKS}.one_seed", []),
    ([f"reward.function={HOOKS}.constant"], "hooks.constant_reward", "reward", ["0.25"]),
    (
        [
            f"reward.function={HOOKS}.asks_judge",
            "+rollout.engines=[{name: actor}, {name: judge, frozen: true, model: m}]",
        ],
        "hooks.failed",
        "reward failed",
        ["'Score: 5'"],
    ),
]


@pytest.mark.parametrize(("overrides", "code", "about", "named"), NOTES, ids=str)
def test_plausible_hook_settings_are_only_noted(run_file, overrides, code, about, named):
    found = examine(run_file, *[override.removeprefix("+") for override in overrides])
    assert found_among(found.notes, code, about, named), found
    assert not found.problems


def test_how_long_a_hook_holds_the_event_loop_is_a_note(run_file):
    found = examine(run_file, f"{GENERATE}={HOOKS}.holding")
    (note,) = (error for error in found.notes if (error.code, error.about) == ("hooks.holding", f"{HOOKS}.holding"))
    assert 0.7 <= numbers(note)[0] < 60 and not found.problems


def test_all_hooks_that_cannot_be_loaded_are_named_at_once(run_file):
    result = CliRunner().invoke(
        app,
        ["doctor", str(run_file), "rollout.generate=no.such", f"reward.function={HOOKS}.nothing", "--hooks"],
    )
    assert result.exit_code == 1
    first, second = (line for line in result.output.splitlines() if line.split()[:1] == ["problem"])
    assert "rollout.generate" in first and "no.such" in first
    assert all(name in second for name in ("reward.function", HOOKS, "nothing"))
    assert result.output.count("  note  ") == 1, "that no hook was tried"


def test_a_hook_that_never_yields_is_abandoned_at_its_deadline(run_file, monkeypatch):
    monkeypatch.setattr(hook_trial, "STUCK_S", 1.0)
    found = examine(run_file, f"rollout.generate={HOOKS}.stuck")
    assert found_among(found.problems, "hooks.blocking", f"{HOOKS}.stuck", ["1 s"]), found


def test_a_filter_receives_the_rollouts_of_a_prompt_as_one_group(run_file):
    found = examine(run_file, f"rollout.filter={HOOKS}.drop")
    assert found.lines[-1].endswith("dropped: no signal") and not found.problems


@pytest.mark.parametrize("option", ["--effects", "--hooks", "--gap"])
def test_without_a_file_it_says_what_it_needs(option):
    result = CliRunner().invoke(app, ["doctor", option])
    assert (result.exception.code, result.exception.about) == ("doctor.file", option)


def test_two_questions_at_once_are_refused(run_file):
    result = CliRunner().invoke(app, ["doctor", str(run_file), "--hooks", "--layers"])
    assert (result.exception.code, result.exception.about) == ("doctor.options", "--gap")


def test_a_hook_that_waits_for_words_hears_them_and_then_the_answer(run_file):
    config = load_config(run_file, [f"rollout.generate={HOOKS}.calling"])
    plain, called = examine_hooks(config), examine_hooks(config, ["7+7", "8+8"])
    assert not called.problems
    rows = [line.split() for line in called.lines if "/0 " in line]
    assert len(rows) == 4 and rows[0][0] == "--say" and len([line for line in plain.lines if "/0 " in line]) == 3
    # Two calls, each of 3 tokens and an end with a result of 1 after it, then "46" and its end.
    assert rows[0][rows[0].index("0/0") + 1 :][:8] == ["21", "11", "p8", "s4", "i1", "s4", "i1", "s3"]
    assert [row[row.index("completed") - 1] for row in rows if "completed" in row] == ["3", "1", "1"]


def test_words_need_hooks_to_hear_them(run_file):
    result = CliRunner().invoke(app, ["doctor", str(run_file), "--say", "7"])
    assert isinstance(result.exception, SlimxError)
    assert (result.exception.code, result.exception.about) == ("doctor.say", "--say")


@pytest.mark.parametrize(
    ("row", "code", "about"),
    [
        ({"image": "python:3.12"}, "box.source", "tasks:2"),
        ({"files": "none"}, "task.row", "tasks:2"),
        ({"image": "a", "root": "b"}, "prompts.map", None),
    ],
    ids=["image that is not there", "files that are not there", "bad task"],
)
@pytest.mark.needs("bwrap", "unshare", "prlimit", "tar")
def test_a_task_that_cannot_begin_is_a_problem_with_its_line(run_file, tmp_path, row, code, about):
    tests = {"command": ["true"]}
    rows = [{"prompt": "p", "tests": tests}, {"prompt": "p", "tests": tests, **row}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(error) + "\n" for error in rows))
    found = examine(
        run_file,
        f"rollout.prompts={tmp_path}/tasks.jsonl",
        "rollout.map=terminal",
        "rollout.generate=tools",
        "rollout.options.toolbox=terminal",
        f"rollout.options.toolbox_options.tasks={tmp_path}",
        "rollout.options.toolbox_options.box.host_usr=true",
    )
    assert [(error.code, error.about) for error in found.problems] == [
        (code, about or f"{tmp_path}/tasks.jsonl, line 2")
    ]
