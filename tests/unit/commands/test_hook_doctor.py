"""`slimx doctor FILE --hooks` names what is wrong with a hook in one sentence, before anything is started."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slimx.cli import app
from slimx.commands.hooks import trial as hook_trial
from slimx.commands.hooks.doctor import Examined, examine_hooks
from slimx.config import load_config

STAND = "tests.unit.commands.hook_doctor_stand"
TOOL = Path(__file__).resolve().parents[3] / "tools" / "quickstart" / "make_model.py"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file of a run of a tiny MoE model with hooks that are right."""
    folder = tmp_path_factory.mktemp("run")
    runpy.run_path(str(TOOL))["make_model"](folder / "model", seed=1)
    lines = [{"messages": [{"role": "user", "content": "12+34="}], "answer": "46", "id": "first"}] * 1
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "rollout": {
            "prompts": str(folder / "prompts.jsonl"),
            "generate": f"{STAND}.good",
            "max_prompt_tokens": 64,
            "group_size": 8,
        },
        "reward": {"function": f"{STAND}.right"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def examine(run_file: Path, *overrides: str) -> Examined:
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
    assert "rollout.generate       tests.unit.commands.hook_doctor_stand.good" in result.output


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.generate=tests.unit.commands.hook_doctor_stand.streaming"],
        ["rollout.generate=tests.unit.commands.hook_doctor_stand.asks_by_hand"],
        ["rollout.generate=examples.debate.generate", "rollout.sampling.top_p=0.9"],
        ["rollout.generate=examples.fan_out.generate", "reward.function=examples.fan_out.reward"],
        [
            "rollout.generate=slime:examples.slime_style.search",
            "rollout.options.turns=2",
            "reward.function=slime:examples.slime_style.right",
            "reward.options.reward_key=score",
        ],
        ["rollout.generate=slimx.rollout.agent.generate", "rollout.options.agent=examples.openai_agent.solve"],
        [
            "rollout.generate=slimx.rollout.multi_turn.generate",
            "rollout.options.environment=tests.unit.environments.environment_stand.Counting",
            "rollout.options.environment_processes=1",
            "reward.function=slimx.rollout.multi_turn.reward",
        ],
    ],
    ids=["stream", "own HTTP", "debate", "fan-out", "slime", "agent", "environment process"],
)
def test_hooks_of_every_kind_work_with_the_scripted_engines(run_file, overrides):
    found = examine(run_file, *overrides)
    assert not found.problems, found.problems


PROBLEMS = [
    (["rollout.generate=no.such.hook"], "rollout.generate: no.such.hook cannot be imported"),
    ([f"rollout.generate={STAND}.blocking"], "must be async; write async def blocking(ctx, prompt)"),
    (["rollout.options.retries=3"], f"rollout.options: {STAND}.good(ctx"),
    ([f"rollout.generate={STAND}.untrained"], f"{STAND}.untrained trains no token"),
    ([f"rollout.generate={STAND}.without_logprobs"], "has a sampled token without a finite log-prob"),
    (
        [f"rollout.generate={STAND}.endless_trajectory", "rollout.routed_experts=false"],
        "makes a trajectory of 120",
    ),
    ([f"rollout.generate={STAND}.unsaveable"], "unsaveable returns what no checkpoint can hold"),
    (
        [f"rollout.generate={STAND}.raising"],
        f"generate failed where the engine says the answer (3 of 3 rollouts): {STAND}.raising",
    ),
    ([f"rollout.generate={STAND}.strange"], "returned a str; return a Trajectory"),
    ([f"rollout.generate={STAND}.unknown_parameter"], "sampling parameter min_p is not supported by the engines"),
    (
        [f"reward.function={STAND}.none"],
        "(3 of 3 rollouts): reward hook tests.unit.commands.hook_doctor_stand.none returned",
    ),
    ([f"rollout.filter={STAND}.strange_keep"], "rollout.filter returned a dict; return True, False or a reason"),
    (
        [f"rollout.filter={STAND}.raising_keep"],
        "rollout.filter raised ValueError on these rollouts as a group: no rewards",
    ),
    ([f"algorithm.loss={STAND}.own_loss"], "algorithm.loss: tests.unit.commands.hook_doctor_stand.own_loss returned"),
    (["rollout.prompts=nowhere.jsonl"], "nowhere.jsonl"),
    (
        [
            f"reward.parts=[{{name: a, function: {STAND}.constant, where: {{dataset: x}}}}]",
            "reward.function=null",
        ],
        "fits no entry of reward.parts",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), PROBLEMS, ids=[said[-40:] for _, said in PROBLEMS])
def test_a_wrong_hook_gives_one_clear_sentence(run_file, overrides, said):
    found = examine(run_file, *overrides)
    assert any(said in problem for problem in found.problems), found
    assert all("\n" not in problem for problem in found.problems)


NOTES = [
    (
        [f"rollout.generate={STAND}.long_prompt"],
        "makes a prompt too long: 78 tokens, where those of the file may have 64",
    ),
    ([f"rollout.generate={STAND}.one_seed", "rollout.routed_experts=false"], "several requests with one turn number"),
    ([f"rollout.generate={STAND}.holding"], "the event loop stood still for 0."),
    ([f"reward.function={STAND}.constant"], "the reward is 0.25 whatever the engine says"),
    (
        [
            f"reward.function={STAND}.asks_judge",
            "+rollout.engines=[{name: actor}, {name: judge, frozen: true, model: m}]",
        ],
        "(frozen models were asked too, and said 'Score: 5': that may be why)",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), NOTES, ids=[said[-40:] for _, said in NOTES])
def test_what_may_be_meant_is_a_note(run_file, overrides, said):
    found = examine(run_file, *[override.removeprefix("+") for override in overrides])
    assert any(said in note for note in found.notes), found
    assert not found.problems


def test_all_hooks_that_cannot_be_loaded_are_named_at_once(run_file):
    result = CliRunner().invoke(
        app,
        ["doctor", str(run_file), "rollout.generate=no.such", f"reward.function={STAND}.nothing", "--hooks"],
    )
    assert result.exit_code == 1
    assert "problem  rollout.generate: no.such" in result.output
    assert f"problem  reward.function: module {STAND} has no nothing" in result.output
    assert "were not tried" in result.output


def test_a_hook_that_never_yields_is_given_up(run_file, monkeypatch):
    monkeypatch.setattr(hook_trial, "STUCK_S", 1.0)
    found = examine(run_file, f"rollout.generate={STAND}.stuck")
    assert [problem for problem in found.problems if "has held the event loop for 1 s" in problem], found


def test_a_filter_is_asked_about_the_rollouts_as_a_group(run_file):
    found = examine(run_file, f"rollout.filter={STAND}.drop")
    assert "  these as one group: dropped: no signal" in found.lines and not found.problems


@pytest.mark.parametrize("option", ["--effects", "--hooks", "--gap"])
def test_without_a_file_it_says_what_it_needs(option):
    result = CliRunner().invoke(app, ["doctor", option])
    assert str(result.exception) == f"slimx doctor {option} needs the YAML file of a run; give it as FILE"


def test_two_questions_at_once_are_refused(run_file):
    result = CliRunner().invoke(app, ["doctor", str(run_file), "--hooks", "--layers"])
    assert str(result.exception) == "slimx doctor takes one of --hooks and --gap at a time; leave one out"
