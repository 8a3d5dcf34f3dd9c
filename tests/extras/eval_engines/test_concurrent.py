"""Evaluations during training belong to the step whose weights they have, whenever their results arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.errors import Preempted, SlimxError
from slimx.extras.eval_engines.concurrent import ConcurrentEvaluationEngines
from slimx.observability.events import Events
from slimx.orchestration.loop import train
from slimx.orchestration.publications import Publications
from slimx.orchestration.run import Run
from slimx.reshard.parties import NoReceiverLeft
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.runtime.tasks import while_served
from tests.refusals import refused
from tests.unit.orchestration.run_stand import LIMIT_S, Members, Parts, lines, run_of, service_of, sources_of, stopped
from tests.unit.rollout.rollout_stand import FakeEngine, prompts

BEGUN, LOST = {"eval/begun": 1.0}, {"eval/lost": 1.0}
KEYS = {"eval__prompts": "held_out.jsonl", "eval__engines": [{"max_total_tokens": 64}]}


class EvaluationMembers(Members):
    """Engines that serve until they are `broken`; those that are `out` wait for weights."""

    def __init__(self) -> None:
        super().__init__()
        self.out = asyncio.Event()
        self.gone: SlimxError | None = None
        """Error after which no engine can be started again."""
        self.watches = 0
        self.runs = asyncio.Event()
        self.runs.set()

    async def available(self) -> None:
        await self.runs.wait()
        if self.gone is not None:
            raise self.gone

    def watch(self) -> None:
        self.watches += 1

    async def starved(self) -> None:
        await self.out.wait()


class HeldEngine(FakeEngine):
    """Answers once `go` is set, or raises `error`. Requests that are cancelled end once `ends` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.error: SlimxError | None = None
        self.cancelled = 0
        self.ends = asyncio.Event()
        self.ends.set()

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.ends.wait()
            raise
        if self.error is not None:
            raise self.error
        return await super().generate(request)


class Published(Publications):
    """Publications that only tell clients the version of their weights. The first `failing` of those to evaluation
    engines reach none, and stop these."""

    def __init__(self, run: Run, parts: Parts, evaluating: FakeEngine, members: EvaluationMembers):
        self.run, self.parts, self.evaluating, self.members = run, parts, evaluating, members
        self.failing = 0
        self.lost = asyncio.Event()
        """The engines that sample are lost for good."""

    async def watched(self, work: Awaitable[Any], step: int, *, training: bool = False) -> Any:
        async def needed() -> None:
            await self.lost.wait()
            raise SlimxError("no engine is left", code="engines.gone", about="actor-0")

        return await while_served(work, needed)

    async def sleep(self) -> None:
        self.parts.done.append("engines sleep")

    async def publish(self, step: int) -> None:
        self.parts.done.append(f"publish {step}")

    async def publish_metrics(self, step: int) -> dict[str, float]:
        self.run.maker.version = self.parts.client.version = step
        return {}

    async def publish_to(self, members: Members, step: int) -> None:
        if self.failing:
            self.failing -= 1
            self.members.runs.clear()
            raise NoReceiverLeft("every engine was lost")
        self.parts.done.append(f"evaluate {step}")
        self.evaluating.version = step


class Told(Events):
    """Events as (kind, about), in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def tell(self, kind: str, what: str, *, about: str = "") -> None:
        self.events.append((kind, about))


@dataclass
class Stand:
    """A run with evaluation engines."""

    run: Run
    parts: Parts
    members: EvaluationMembers
    client: HeldEngine
    publications: Published
    told: Told
    notes: list[str]

    async def train(self) -> None:
        try:
            await asyncio.wait_for(train(self.run), LIMIT_S)
        finally:
            await self.run.evaluation_engines.cancel()
            await stopped(self.run)


def evaluating(directory: Path, *, held: bool = False, leaving: asyncio.Event | None = None, **keys: Any) -> Stand:
    """Returns a run that evaluates every step. `held`: evaluations take until `client.go` is set."""
    parts, client, members, told = Parts(), HeldEngine(), EvaluationMembers(), Told()
    notes: list[str] = []
    run = run_of(directory, parts, leaving, **({"eval__prompts": "held_out.jsonl", "eval__every": 1} | keys))
    run.records.events = told
    run.eval_prompts = {"": prompts()[:3]}

    async def stop() -> None:
        """Stops nothing."""

    group = SimpleNamespace(members=members, engines=[], stop=stop)
    service = service_of(run.config, sources_of(run.config), {})
    run.evaluation_engines = ConcurrentEvaluationEngines(service, group, notes.append)
    run.evaluation_engines.clients["actor"] = client
    publications = Published(run, parts, client, members)
    run.policies["actor"].publications = publications
    if not held:
        client.go.set()
    return Stand(run, parts, members, client, publications, told, notes)


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


@pytest.mark.parametrize("last", [False, True])
async def test_a_run_that_is_asked_to_stop_does_not_wait(tmp_path, last):
    leaving = asyncio.Event()
    stand = evaluating(tmp_path, held=True, leaving=leaving, schedule__steps=1 if last else 3)
    training = asyncio.create_task(stand.train())
    await until(lambda: "train 0 at version 0" in stand.parts.done)
    await asyncio.sleep(0.1)
    leaving.set()
    async with asyncio.timeout(10):
        if last:
            await training
        else:
            with pytest.raises(Preempted):
                await training
    assert "save 1" in stand.parts.done and "evaluate 1" not in stand.parts.done
    lost = [("evaluation_lost", "step 0"), ("evaluation_lost", "step 1")]
    assert stand.told.events == (lost if last else [])
    # The process that resumes at step 1 repeats its evaluation, and counts that of step 0 as lost.
    found = evaluated(tmp_path)
    assert found == ({0: [BEGUN, LOST], 1: [LOST]} if last else {0: [BEGUN], 1: [BEGUN]})


@pytest.mark.parametrize("starts", [True, False])
async def test_the_last_evaluation_is_lost_if_the_run_is_asked_to_stop(tmp_path, starts):
    """Also if none of its engines runs yet."""
    leaving = asyncio.Event()
    stand = evaluating(tmp_path, held=True, leaving=leaving, schedule__steps=1)
    stand.run.step = 1
    if not starts:
        stand.members.runs.clear()
    ending = asyncio.create_task(stand.run.evaluation_engines.begin(stand.run))
    await until(lambda: stand.members.watches == 1 and ("evaluate 1" in stand.parts.done) == starts)
    await asyncio.sleep(0.1)
    leaving.set()
    assert await asyncio.wait_for(ending, 10) == {}
    assert evaluated(tmp_path) == {1: [LOST]} and stand.told.events == [("evaluation_lost", "step 1")]
    await stopped(stand.run)


async def test_the_loss_of_all_other_engines_is_noticed_meanwhile(tmp_path):
    stand = evaluating(tmp_path, held=True, schedule__steps=3)
    training = asyncio.create_task(stand.train())
    await until(lambda: "train 0 at version 0" in stand.parts.done)
    await asyncio.sleep(0.1)
    stand.publications.lost.set()
    async with asyncio.timeout(10):
        with refused("engines.gone", about="actor-0"):
            await training


async def test_engines_that_share_devices_go_on_until_those_that_evaluate_run(tmp_path):
    stand = evaluating(tmp_path, schedule__steps=1, schedule__colocate=True)
    engines, done = stand.run.evaluation_engines, stand.parts.done
    stand.members.runs.clear()
    beginning = asyncio.create_task(engines.begin(stand.run))
    await asyncio.sleep(0.1)
    assert done == [], "no turn of the trainers while the engine is restarted"
    stand.publications.failing = 1
    stand.members.runs.set()
    turn = ["engines sleep", "reload trainers", "offload optimizer", "publish 0"]
    await until(lambda: done == turn)  # the turn has ended although nothing was published to the engines
    await asyncio.sleep(0.1)
    assert done == turn and not beginning.done()
    stand.members.runs.set()
    assert await asyncio.wait_for(beginning, LIMIT_S) == BEGUN
    assert done == [*turn, *turn[:2], "evaluate 0", *turn[2:]]
    await engines.cancel()
    await stopped(stand.run)


async def test_a_resumed_run_repeats_its_steps_evaluation_and_counts_others(tmp_path):
    begun = {"eval/begun": 1.0}
    stand = evaluating(tmp_path, schedule__steps=3)
    for step, metrics in ((0, begun), (0, {"eval/accuracy": 1.0}), (1, begun), (2, begun)):
        stand.run.records.tracker.log(step, metrics)
    stand.run.step = 2
    await stand.train()
    found = evaluated(tmp_path)
    assert found[1] == [begun, {"eval/lost": 1.0}] and len(found[0]) == 2
    assert (
        len(found[2]) == 2
        and found[2][0] == begun
        and found[2][1]["eval/accuracy"] == 1.0
        and found[3][-1]["eval/accuracy"] == 1.0
    )
    assert [what for what in stand.parts.done if what.startswith("evaluate")] == ["evaluate 2", "evaluate 3"]


async def test_an_evaluation_is_counted_as_lost_once_over_several_resumes(tmp_path):
    stand = evaluating(tmp_path, schedule__steps=3)
    for step, metrics in ((1, BEGUN), (1, LOST), (2, BEGUN), (2, {"eval/accuracy": 1.0})):
        stand.run.records.tracker.log(step, metrics)
    stand.run.step = 2
    assert await stand.run.evaluation_engines.begin(stand.run, resumed=True) == {}
    assert evaluated(tmp_path)[1] == [BEGUN, LOST] and stand.told.events == []
    await stopped(stand.run)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_run_resumed_after_its_last_step_evaluates_it(tmp_path, leaves):
    """For example one whose `schedule.steps` was lowered, or that was killed before its export."""
    leaving = asyncio.Event()
    stand = evaluating(tmp_path, held=leaves, leaving=leaving, schedule__steps=2)
    stand.run.records.tracker.log(2, BEGUN)
    stand.run.step = 2
    training = asyncio.create_task(stand.train())
    if leaves:
        await until(lambda: "evaluate 2" in stand.parts.done)
        leaving.set()
    await training
    begun, end = evaluated(tmp_path)[2]
    assert begun == BEGUN and (end == LOST if leaves else end["eval/accuracy"] == 1.0)


async def test_engines_are_watched_once_and_their_hooks_are_closed(tmp_path):
    stand = evaluating(tmp_path, schedule__steps=2)
    engines, closed = stand.run.evaluation_engines, []
    make = stand.run.evaluation_engines._service.make_maker

    def make_maker(served: Any) -> Any:
        maker = make(served)
        maker.close = lambda: closed.append(maker)
        return maker

    engines._service.make_maker = make_maker
    await stand.train()
    assert stand.members.watches == 1 and len(closed) == 1
