"""An evaluation without trainers: its record, and the table that is printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slimx.config.sections.eval import Eval
from slimx.extras.evaluation.run import evaluate_once, table
from slimx.extras.evaluation.settings import by_keys, lengths
from tests.extras.generation.serving_stand import config_in, service_in, write_model
from tests.refusals import numbers
from tests.unit.rollout.rollout_stand import prompts


def test_an_evaluation_scores_every_set(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = config_in(tmp_path, model, eval__samples=2, eval__temperature=1.0)

    async def work() -> dict[str, Any]:
        return await evaluate_once(service_in(config))

    found = asyncio.run(work())
    assert found["prompts"] == {"few": 3} and found["checkpoint"] == str(model)
    assert found.keys() == {"checkpoint", "time", "sets", "prompts", "metrics"}, "only sets contain sampling settings"
    assert found["metrics"]["eval/few/pass@2"] == 1.0 and found["metrics"]["eval/failed"] == 0
    head, columns, few, everything = table(found)
    assert head.startswith(f"{model}: ") and numbers(head)[-2:] == [2, 1], "answers of a prompt, and the temperature"
    assert columns.split() == ["set", "prompts", "accuracy", "pass@2"]
    assert few.split() == ["few", "3", "1.000", "1.000"] and everything.split() == ["all", "3", "1.000", "1.000"]


def test_sets_may_have_settings_of_their_own(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    few = {"path": "few.jsonl", "samples": 4, "temperature": 1.0, "max_new_tokens": 3}
    config = config_in(tmp_path, model, eval__prompts={"few": few, "greedy": "greedy.jsonl"})

    async def work() -> dict[str, Any]:
        service = service_in(config)
        service.sources.eval_prompts["greedy"] = prompts()[:2]
        return await evaluate_once(service)

    found = asyncio.run(work())
    assert found["sets"]["few"] == {"samples": 4, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 3}
    assert (found["sets"]["greedy"]["samples"], found["sets"]["greedy"]["temperature"]) == (1, 0.0)
    assert "eval/few/pass@4" in found["metrics"] and "eval/greedy/pass@2" not in found["metrics"]
    _, of_few, of_greedy, *_ = table(found)
    assert numbers(of_few)[-2:] == [4, 1] and numbers(of_greedy)[-2:] == [1, 0]


def test_settings_are_known_by_the_keys_that_contain_their_values() -> None:
    options = Eval(prompts={"aime": {"path": "a", "max_new_tokens": 64}, "math": "m"})
    assert lengths(options) == {"eval.prompts.aime.max_new_tokens": 64}
    assert by_keys(options, "max_new_tokens", "top_p").keys() == {
        ("eval.prompts.aime.max_new_tokens", "eval.top_p"),
        ("eval.max_new_tokens", "eval.top_p"),
    }
    assert by_keys(Eval(), "top_p").keys() == by_keys(options, "top_p").keys() == {("eval.top_p",)}
    inherited = Eval(prompts={"aime": {"path": "a", "samples": 4}, "math": "m"}, max_new_tokens=8)
    assert lengths(inherited) == {"eval.max_new_tokens": 8}
    off = options.model_copy(update={"every": 0})
    assert lengths(off) == {} and off.files == off.sets == {}


def test_the_table_tells_what_hooks_logged() -> None:
    found = {"checkpoint": "m", "sets": {"": {"samples": 1, "temperature": 0.0}}, "prompts": {"": 4}}
    metrics = {
        "eval/accuracy": 0.5,
        "eval/failed": 0.0,
        "eval_hook/ifeval/kept/mean": 1.25,
        "eval_hook/ifeval/kept/max": 2,
    }
    rows = [line for line in table(found | {"metrics": metrics}) if "ifeval/kept" in line]
    assert len(rows) == 1 and rows[0].split()[1].startswith("1.250")
