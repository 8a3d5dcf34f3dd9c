"""Evaluation engines: a step's weights are judged at that step, across a kill as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import TrainProcess, completed_steps, write_config, written

pytestmark = [pytest.mark.integration, pytest.mark.slow("eight whole runs")]


@pytest.mark.parametrize(
    ("colocate", "publish"),
    [
        (False, {}),
        (True, {}),
        (False, {"transport": "disk", "delta": {"every_full": 3}}),
        (False, {"transport": "nixl", "delta": {"every_full": 2}}),
    ],
    ids=["apart", "colocated", "deltas on disk", "direct deltas"],
)
def test_evaluations_during_training_belong_to_their_step_across_a_kill(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path, colocate: bool, publish: dict[str, Any]
) -> None:
    held_out, go, run = tmp_path / "held_out.jsonl", tmp_path / "go", tmp_path / "run"
    rows = [json.loads(line) for line in (task_of_sums / "heldout.jsonl").read_text().splitlines()[:3]]
    held_out.write_text("".join(json.dumps(row | {"metadata": {"go": str(go)}}) + "\n" for row in rows))
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        rollout={"generate": "tests.integration.hooks.held_at_step_2"},
        reward={"function": "tests.integration.hooks.version_in_evaluations"},
        schedule={"steps": 5, "colocate": colocate},
        publish=publish,
        policies={"solver": {"shares": "actor"}},
        checkpoint={"every": 2},
        eval={
            "prompts": {
                "sums": {"path": str(held_out), "samples": 2, "temperature": 1.0, "max_new_tokens": 6},
                "greedy": str(held_out),
            },
            "every": 2,
            "engines": [{"max_total_tokens": 8192}],
        },
    )
    first = TrainProcess(config)
    # Training goes on beyond step 2 while the evaluation of step 2 waits.
    first.until(lambda: completed_steps(run) >= 3)
    first.kill()
    first.wait()
    first.assert_nothing_left()
    before = [(row["step"], row["metrics"]) for row in written(run / "metrics.jsonl")]
    assert [step for step, metrics in before if "eval/begun" in metrics] == [0, 2]
    assert [(step, metrics["eval/accuracy"]) for step, metrics in before if "eval/accuracy" in metrics] == [(0, 0.0)]
    go.touch()
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    second.assert_nothing_left()
    found: dict[int, list[dict[str, float]]] = {}
    for row in written(run / "metrics.jsonl"):
        found.setdefault(row["step"], []).append(row["metrics"])
    judged = {step: parts for step, parts in found.items() if any("eval/accuracy" in part for part in parts)}
    assert judged.keys() == {0, 2, 4, 5}
    for step, parts in judged.items():
        (result,) = (part for part in parts if "eval/accuracy" in part)
        # The reward in an evaluation is the version of the weights that sampled.
        assert result["eval/accuracy"] == result["eval/sums/accuracy"] == result["eval/greedy/accuracy"] == step
        assert result["eval/failed"] == 0 and "eval/sums/pass@2" in result and "eval/greedy/pass@2" not in result
    assert not any("eval/lost" in part for parts in found.values() for part in parts)
    assert all(sum("time/step" in part for part in parts) == (step > 0) for step, parts in found.items())
