"""Evaluation during training, by evaluation engines.

    step N is published --> begin: wait for the previous evaluation, publish N to these engines --> train step N + 1 ...
                                         |
                                         +--> answers --> metrics of step N, as a further line of metrics.jsonl

An evaluation that has begun is marked by the metric `eval/begun` in its step's line. If the process ends before the
result is there, the next process repeats the evaluation if it resumes at this step, and else counts it as lost. One
that fails is reported at once and counted as lost, and training goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from slimx.cluster.restarts import Restart
from slimx.config.sections.policies import ACTOR
from slimx.engines.fleet.group import EngineGroup
from slimx.errors import SlimxError, first_line
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from slimx.orchestration.engines.service import EngineService, EvaluationEngines
from slimx.orchestration.publications import EnginePublications
from slimx.orchestration.run import Run
from slimx.orchestration.step.evaluation import answer_all, judged
from slimx.reshard.parties import NoReceiverLeft, TransportLost
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome
from slimx.runtime.tasks import while_served

BEGUN = "eval/begun"
"""Metric of a step whose evaluation began during training."""
LOST = "eval/lost"
"""Metric of a step whose evaluation ended without a result."""
ENDING_S = 60.0
"""Maximum number of seconds to wait until a cancelled evaluation has ended, because hooks may ignore that they are
cancelled."""


class ConcurrentEvaluationEngines(EvaluationEngines):
    """The evaluation engines of a run, with a router of their own, and the evaluation that they work on."""

    def __init__(self, service: EngineService, group: EngineGroup, note: Callable[[str], None]):
        """Prepares evaluations by the engines of `group`. `service`: the run's other engines. `note`: called with a
        line of text about every event."""
        super().__init__(service.config)
        self._service = service
        self._note = note
        self.group = group
        self.groups = {ACTOR: group}
        self._maker: GroupMaker | None = None
        self._step = 0
        """Step of the current or most recent evaluation."""
        self._work: asyncio.Task[dict[str, float]] | None = None
        """The evaluation that goes on, which raises an error only if the loss of its result cannot be recorded; None
        between evaluations."""
        self._open: set[int] = set()
        """Steps whose evaluations were asked for and have neither a result nor been lost."""
        self._lost: list[int] = []
        """Steps whose evaluations this process has reported as lost."""

    async def begin(self, run: Run, *, resumed: bool = False) -> dict[str, float]:
        """Waits for the previous evaluation, publishes the current weights to these engines, and begins to evaluate
        them. After the run's last step, waits for the result and returns it. `eval.deadline` bounds each wait for a
        result, `rollout.health.outage_deadline` the wait for an engine, and `publish.deadline` the publication. If the
        run is asked to save and stop, waits no longer: the process that resumes the run repeats the evaluation, and
        after the last step it is lost. Returns {} if the evaluation is lost."""
        if resumed:
            await self._resume(run)
            return {}
        step = run.step
        self._open.add(step)
        if self._maker is None:
            self.group.members.watch()
            self._maker = self._service.make_maker(self)
        result: dict[str, float] | None = None
        while await self._unless_over(run, self._ready(run)):
            if await self._publish(run):
                self._step = step
                self._work = asyncio.create_task(self._reported(run, self._maker, step))
                break
        if step < run.config.schedule.steps:
            return {BEGUN: 1.0} if step in self._open else {}
        if self._step == step:
            result = await self._unless_over(run, self._result(run))
        if result is None:
            await self._abandon(run, "the run is asked to stop")
        return result or {}

    async def _resume(self, run: Run) -> None:
        """Repeats the evaluation of the step at which the run resumes if it has no result, and counts those of earlier
        steps without a result as lost."""
        file = Path(run.config.run.dir) / "metrics.jsonl"
        records = load_records(file, StepRecord.from_json)[0] if file.exists() else []
        begun = [record.step for record in records if BEGUN in record.metrics]
        ended = {record.step for record in records if {"eval/accuracy", LOST} & record.metrics.keys()}
        for step in begun:
            if step == run.step and step not in ended:
                self._note(f"the evaluation of step {step} is repeated, because the earlier process did not finish it")
                with run.phase("eval"):
                    result = await self.begin(run)
                if result and BEGUN not in result:  # after the last step, nothing else logs metrics
                    run.records.tracker.log(step, result, version=step)
            elif step not in ended:
                self._lose(run, step, "the earlier process ended, and the weights of this step are gone")

    async def cancel(self) -> None:
        """Cancels the evaluation that goes on, and names the steps whose evaluations are unfinished or were lost."""
        for kind, steps in (("are not finished", sorted(self._open)), ("were lost", self._lost)):
            if steps:
                self._note(f"evaluations that {kind}: {', '.join(f'step {step}' for step in steps)}")
        await self._end(self._work)
        if self._maker is not None:
            self._maker.close()

    async def stop(self) -> None:
        """Stops the router and the servers that slimx started."""
        await self.group.stop()

    async def _unless_over[T](self, run: Run, work: Awaitable[T]) -> T | None:
        """Awaits `work` and returns its result; None if the run is asked to save and stop. Raises SlimxError if no
        engine that samples is left, unless the run has no further step, which would need one."""
        waiting = run.unless_leaving(work)
        return await (waiting if run.step == run.config.schedule.steps else run.watched(waiting))

    async def _ready(self, run: Run) -> bool:
        """Waits for the previous evaluation, and until an engine runs. Returns False if none can be started again, so
        that the current step's evaluation is lost. Engines are awaited outside of the trainers' turn, during which
        colocated engines sleep and none restarts."""
        await self._result(run)
        try:
            await self.group.members.available()
        except SlimxError as error:
            self._lose(run, run.step, first_line(error))
            return False
        return True

    async def _publish(self, run: Run) -> bool:
        """Publishes the weights to these engines. Returns False if none of them has received the weights."""
        publications = cast(EnginePublications, run.policies[ACTOR].publications)
        async with run.trainers_turn():
            try:
                await publications.publish_to(self.group.members, run.step)
            except (NoReceiverLeft, TransportLost) as error:
                self._note(first_line(error))
                return False
        return True

    async def _reported(self, run: Run, maker: GroupMaker, step: int) -> dict[str, float]:
        """Evaluates the weights of `step` and returns the metrics; {} if the evaluation fails. Reports the error at
        once instead of raising it: training can go on, and its last checkpoint may be old."""
        try:
            metrics = await self._evaluate(run, maker, step)
        except SlimxError as error:
            self._lose(run, step, first_line(error))
        except Exception as error:
            self._lose(run, step, f"{type(error).__name__}: {first_line(error)}")
        else:
            self._open.discard(step)
            return metrics
        return {}

    async def _evaluate(self, run: Run, maker: GroupMaker, step: int) -> dict[str, float]:
        since = time.time()
        clock = time.perf_counter()
        maker.version = step
        members = self.group.members

        async def lose() -> None:
            raise SlimxError(
                "all evaluation engines were lost, and the weights of this step are gone",
                code="eval.lost",
                about="eval.engines",
            )

        outcomes: list[GroupOutcome] = await while_served(answer_all(maker, run.eval_prompts), members.starved, lose)
        metrics = await judged(run, outcomes, step)
        seconds = time.perf_counter() - clock
        detail = f"step {step}"
        run.records.timeline.add(
            Phase(name="eval", step=None, track="evaluation", start=since, seconds=seconds, detail=detail)
        )
        if step < run.config.schedule.steps:  # the training loop logs the metrics of the last step
            run.records.tracker.log(step, metrics, version=step)
        return metrics

    async def _result(self, run: Run) -> dict[str, float]:
        """Waits for the evaluation that goes on and returns its metrics; {} if there is none, or if it is lost, as it
        is after `eval.deadline`."""
        work = self._work
        if work is None:
            return {}
        limit = run.config.eval.deadline
        done, _ = await asyncio.wait({work}, timeout=limit)
        if done:
            self._work = None
            return work.result()
        await self._abandon(run, f"it has no result after another {limit:g} s (eval.deadline)", self._step)
        return {}

    async def _abandon(self, run: Run, reason: str, *steps: int) -> None:
        """Counts the evaluations of `steps`, by default all that are open, as lost because of `reason`, and cancels the
        one that goes on. They are counted first, because the cancellation may be interrupted."""
        for step in steps or sorted(self._open):
            self._lose(run, step, reason)
        work = self._work
        self._work = None
        await self._end(work)

    async def _end(self, work: asyncio.Task[dict[str, float]] | None) -> None:
        """Cancels `work` and waits until it has ended, at most `ENDING_S` or `eval.deadline`, if this is shorter."""
        if work is not None:
            work.cancel()
            ending = asyncio.gather(work, return_exceptions=True)
            await asyncio.wait({ending}, timeout=min(ENDING_S, self.config.eval.deadline))

    def _lose(self, run: Run, step: int, reason: str) -> None:
        sentence = f"the evaluation of step {step} is lost: {reason}"
        self._open.discard(step)
        self._lost.append(step)
        self._note(sentence)
        run.records.events.tell("evaluation_lost", sentence, about=f"step {step}")
        run.records.tracker.log(step, {LOST: 1.0}, version=step)


def make_engines(
    service: EngineService, *, note: Callable[[str], None], record: Callable[[Restart], None]
) -> ConcurrentEvaluationEngines:
    """Creates the evaluation engines without starting servers. `service`: the run's other engines. `note`:
    called with a line of text about every event. `record`: called with every restart."""
    group = EngineGroup(
        service.config,
        service.device,
        service.logs,
        moe=service.sources.policies[ACTOR].spec.experts > 0,
        note=note,
        record=record,
        router="router-eval",
        groups=service.config.served.evaluation,
    )
    return ConcurrentEvaluationEngines(service, group, note)
