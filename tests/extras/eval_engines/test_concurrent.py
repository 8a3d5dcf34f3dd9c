"""Evaluations during training belong to the step whose weights they have, whenever their results arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.errors import SlimxError
from slimx.extras.eval_engines.concurrent import EnginesBeside
from slimx.extras.generation.checks import without_trainers
from slimx.orchestration.loop import train
from slimx.orchestration.publications import Publications
from slimx.orchestration.run import Run
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from tests.refusals import invalid, refused
from tests.unit.orchestration.run_stand import LIMIT_S, Members, Parts, lines, run_of, service_of, sources_of, stopped
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, prompts

BESIDE = {"eval__prompts": "held_out.jsonl", "eval__engines": [{"max_total_tokens": 64}]}


class EvaluationMembers(Members):
    """Engines that serve until they are `broken`; those that are `out` wait for weights."""

    def __init__(self) -> None:
        super().__init__()
        self.out = asyncio.Event()

    def watch(self) -> None:
        """Watches nothing."""

    async def starved(self) -> None:
        await self.out.wait()


class HeldEngine(FakeEngine):
    """Answers once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Completion:
        await self.go.wait()
        return await super().generate(request)


class Published(Publications):
    """Publications that only tell clients the version of their weights."""

    def __init__(self, run: Run, parts: Parts, evaluating: FakeEngine):
        self.run, self.parts, self.evaluating = run, parts, evaluating

    async def publish_metrics(self, step: int) -> dict[str, float]:
        self.run.maker.version = self.parts.client.version = step
        return {}

    async def publish_to(self, members: Members, step: int) -> None:
        self.parts.done.append(f"evaluate {step}")
        self.evaluating.version = step


@dataclass
class Stand:
    """A run with engines that evaluate while it trains."""

    run: Run
    parts: Parts
    members: EvaluationMembers
    client: HeldEngine

    async def train(self) -> None:
        try:
            await asyncio.wait_for(train(self.run), LIMIT_S)
        finally:
            await self.run.evaluation.cancel()
            await stopped(self.run)


def evaluating(directory: Path, *, held: bool = False, **keys: Any) -> Stand:
    """Returns a run that evaluates every step. `held`: evaluations take until `client.go` is set."""
    parts, client, members = Parts(), HeldEngine(), EvaluationMembers()
    run = run_of(directory, parts, **({"eval__prompts": "held_out.jsonl", "eval__every": 1} | keys))
    run.eval_prompts = {"": prompts()[:3]}

    async def stop() -> None:
        """Stops nothing."""

    group = SimpleNamespace(members=members, engines=[], stop=stop)
    service = service_of(run.config, sources_of(run.config), {})
    run.evaluation = EnginesBeside(service, group, run.records.table.note)
    run.evaluation.clients["actor"] = client
    run.policies["actor"].publications = Published(run, parts, client)
    if not held:
        client.go.set()
    return Stand(run, parts, members, client)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def evaluated(directory: Path) -> dict[int, list[dict[str, float]]]:
    """Returns the evaluations' metrics by step, one mapping for each line."""
    found: dict[int, list[dict[str, float]]] = {}
    for line in lines(directory / "metrics.jsonl"):
        metrics = {key: value for key, value in line["metrics"].items() if key.startswith("eval/")}
        if metrics:
            found.setdefault(line["step"], []).append(metrics)
    return found


async def test_every_result_belongs_to_the_step_of_its_weights(tmp_path):
    stand = evaluating(tmp_path, schedule__steps=3)
    await stand.train()
    found = evaluated(tmp_path)
    assert found.keys() == {0, 1, 2, 3}
    for step in (0, 1, 2):
        begun, result = sorted(found[step], key=len)
        assert begun == {"eval/begun": 1.0} and result["eval/accuracy"] == 1.0 and result["eval/failed"] == 0
    assert [metrics["eval/accuracy"] for metrics in found[3]] == [1.0], "the run's end waits for the last result"
    samples = [line for line in lines(tmp_path / "samples.jsonl") if line["evaluation"]]
    assert {(line["step"], line["version"]) for line in samples} == {(step, step) for step in range(4)}


async def test_training_goes_on_meanwhile_and_the_next_evaluation_waits(tmp_path):
    stand = evaluating(tmp_path, held=True, schedule__steps=4, eval__every=2)
    training = asyncio.create_task(stand.train())
    await until(lambda: "train 1 at version 1" in stand.parts.done)
    await asyncio.sleep(0.2)
    assert not stand.client.requests and "evaluate 2" not in stand.parts.done and not training.done()
    stand.client.go.set()
    await training
    done = [what for what in stand.parts.done if what.startswith(("train", "evaluate"))]
    trainings = [f"train {step} at version {step}" for step in range(4)]
    assert done == ["evaluate 0", *trainings[:2], "evaluate 2", *trainings[2:], "evaluate 4"]
    steps = [(line["step"], "eval/accuracy" in line["metrics"]) for line in lines(tmp_path / "metrics.jsonl")]
    # The result of step 0 is there when the evaluation of step 2 begins, before the line of step 2.
    assert steps[:4] == [(0, False), (1, False), (0, True), (2, False)] and steps[-1] == (4, True)


async def test_a_late_evaluation_is_counted_and_training_goes_on(tmp_path):
    stand = evaluating(tmp_path, held=True, schedule__steps=2, eval__deadline=0.1)
    await stand.train()
    assert [metrics[-1] for _, metrics in sorted(evaluated(tmp_path).items())] == [{"eval/lost": 1.0}] * 3


async def test_an_evaluation_whose_engines_are_all_lost_is_counted(tmp_path):
    stand = evaluating(tmp_path, held=True, schedule__steps=1)
    training = asyncio.create_task(stand.train())
    await until(lambda: "train 0 at version 0" in stand.parts.done)
    stand.members.out.set()
    await until(lambda: {"eval/lost": 1.0} in evaluated(tmp_path).get(0, ()))
    stand.members.out.clear()
    stand.client.go.set()
    await training
    assert evaluated(tmp_path)[0] == [{"eval/begun": 1.0}, {"eval/lost": 1.0}]


async def test_the_run_ends_if_no_engine_can_be_started_again(tmp_path):
    stand = evaluating(tmp_path, held=True, schedule__steps=2)

    async def failed() -> None:
        raise SlimxError("no engine is left", code="engines.gone", about="eval-0")

    stand.members.starved = failed
    with refused("engines.gone", about="eval-0"):
        await stand.train()


async def test_a_resumed_run_repeats_its_steps_evaluation_and_counts_others(tmp_path):
    begun = {"eval/begun": 1.0}
    stand = evaluating(tmp_path, schedule__steps=3)
    for step, metrics in ((0, begun), (0, {"eval/accuracy": 1.0}), (1, begun), (2, begun)):
        stand.run.records.tracker.log(step, metrics)
    stand.run.step = 2
    await stand.train()
    found = evaluated(tmp_path)
    assert found[1] == [begun, {"eval/lost": 1.0}] and len(found[0]) == 2
    assert found[2][0] == begun and found[2][-1]["eval/accuracy"] == 1.0 and found[3][-1]["eval/accuracy"] == 1.0
    assert [what for what in stand.parts.done if what.startswith("evaluate")] == ["evaluate 2", "evaluate 3"]


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"eval__prompts": None}, "eval.engines_idle"),
        ({"eval__engines": [{"role": "prefill"}]}, "eval.engines_role"),
        ({"eval__engines": [{"name": "actor"}]}, "eval.engines_name"),
        ({"publish__delta": {"every_full": 5}, "publish__transport": "disk"}, "eval.engines_unproven"),
    ],
)
def test_what_cannot_work_is_refused(keys, code):
    if "eval__prompts" in keys:
        with invalid(code, about="eval.engines"):
            config_of(eval__engines=BESIDE["eval__engines"])
        return
    with invalid(code, about="eval.engines"):
        config_of(**BESIDE | keys)


def test_engines_during_training_are_started_only_if_the_run_evaluates():
    config = config_of(**BESIDE)
    assert [group.name for group in config.served.evaluating] == ["eval"]
    assert config.served.sampling == config.rollout.engines
    assert config.served.groups == (*config.rollout.engines, *config.eval.engines)
    assert without_trainers(config, None).served.evaluating == (), "slimx eval needs no engines during training"
    for off in ({"eval__every": 0}, {"eval__prompts": None}):
        assert config_of(**BESIDE | off).served.evaluating == ()
