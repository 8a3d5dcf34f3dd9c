"""`slimx.plan` and `slimx.doctor` return what the commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

import slimx
from slimx.extras.quickstart.make_model import make_model


def right(ctx: slimx.RewardContext, trajectory: slimx.Trajectory) -> bool:
    return ctx.text.strip() == ctx.prompt.answer


@pytest.fixture
def source(tmp_path: Path) -> dict[str, object]:
    make_model(tmp_path / "model", seed=1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n' * 8)
    return {
        "run.dir": str(tmp_path / "run"),
        "model.path": str(tmp_path / "model"),
        "rollout": {"prompts": str(prompts), "max_prompt_tokens": 8, "sampling": {"max_new_tokens": 4}},
        "cluster.device": "cpu",
        "numerics.dtype": "float32",
        "checkpoint.every": 5,
    }


def test_a_plan_is_the_text_of_the_command_and_its_figures(source: dict[str, object]) -> None:
    plan = slimx.plan(source, {"rollout.group_size": 4})
    assert plan.report.parameters > 1e5 and plan.violations == () and str(plan) == repr(plan) == plan.text
    assert str(plan).startswith("model") and "x 4 = " in str(plan)
    refused = slimx.plan(source, {"trainer": {"world_size": 3, "expert": 3}})
    assert refused.violations and refused.violations[0] in str(refused)


def test_the_doctor_returns_problems_as_rows(source: dict[str, object]) -> None:
    table = slimx.doctor(source, reward=right)
    assert {"Machine", "Devices", "Packages", "Run"} <= {*table["section"]}
    (hooks,) = [row for row in table if row["section"] == "Run" and row["name"] == "hooks" and not row["problem"]]
    assert f"{__name__}.right" in hooks["text"]
    wrong = slimx.doctor(source, {"model.path": "nowhere"})[-1]
    assert wrong["section"] == "Run" and wrong["needed"] and "nowhere" in wrong["problem"]
    assert "Run" not in slimx.doctor()["section"]
