"""Evaluations during training that have no result are reported at once and counted, and training goes on."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from slimx.errors import SlimxError
from tests.extras.eval_engines.test_concurrent import BEGUN, LOST, evaluated, evaluating, until
from tests.refusals import numbers
from tests.unit.orchestration.run_stand import LIMIT_S, stopped

GONE = SlimxError("no engine is left", code="engines.gone", about="eval-0")


@pytest.mark.parametrize(("fault", "deadline"), [("late", 0.1), ("engines", LIMIT_S)])
async def test_a_lost_evaluation_is_counted_and_training_goes_on(tmp_path, fault, deadline):
    stand = evaluating(tmp_path, held=True, schedule__steps=1, eval__deadline=deadline)
    training = asyncio.create_task(stand.train())
    if fault == "engines":
        await until(lambda: "train 0 at version 0" in stand.parts.done)
        stand.members.out.set()
    await until(lambda: LOST in evaluated(tmp_path).get(0, ()))
    assert stand.client.cancelled >= 3, "its three answers are generated no longer"
    stand.members.out.clear()
    stand.client.go.set()
    await training
    assert evaluated(tmp_path)[0] == [BEGUN, LOST]


@pytest.mark.parametrize("fault", ["engines", "answers", "disk"])
async def test_a_failed_evaluation_is_reported_once_and_at_once(tmp_path, fault):
    stand = evaluating(tmp_path, held=True, schedule__steps=2)
    engines, records = stand.run.evaluation_engines, stand.run.records

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    save = records.evaluation
    assert await engines.begin(stand.run) == BEGUN
    if fault == "engines":
        stand.members.out.set()
    elif fault == "answers":
        stand.client.error = SlimxError("no prompt fits", code="prompt.long", about="p")
    else:
        records.evaluation = full
    if fault != "engines":
        stand.client.go.set()
    await until(lambda: evaluated(tmp_path) == {0: [LOST]})  # although no other evaluation has begun
    assert stand.told.events == [("evaluation_lost", "step 0")] and len(stand.notes) == 1
    stand.members.out.clear()
    stand.client.error, records.evaluation = None, save
    stand.run.step = 1
    assert await engines.begin(stand.run) == BEGUN
    stand.client.go.set()
    await until(lambda: 1 in evaluated(tmp_path))
    assert stand.told.events == [("evaluation_lost", "step 0")] and evaluated(tmp_path)[0] == [LOST]
    before = len(stand.notes)
    await engines.cancel()
    assert [numbers(note) for note in stand.notes[before:]] == [[0]], "named again at the run's end"
    await stopped(stand.run)


@pytest.mark.parametrize("fault", ["answers", "engines", "restarts"])
async def test_a_lasting_failure_costs_no_training(tmp_path, fault):
    """It never ends the run before what was trained is saved."""
    stand = evaluating(tmp_path, schedule__steps=2)
    if fault == "answers":
        stand.client.error = SlimxError("no prompt fits", code="prompt.long", about="p")
    elif fault == "engines":
        stand.client.go.clear()

        async def failed() -> None:
            raise GONE

        stand.members.starved = failed
    else:
        stand.members.gone = GONE
    await stand.train()
    assert "save 2" in stand.parts.done
    begun = [] if fault == "restarts" else [BEGUN]
    found = evaluated(tmp_path)
    assert {step: sorted(found[step], key=str) for step in found} == {0: [*begun, LOST], 1: [*begun, LOST], 2: [LOST]}
    assert stand.told.events == [("evaluation_lost", f"step {step}") for step in range(3)]


async def test_the_last_result_is_awaited_without_the_engines_that_sample(tmp_path):
    """They have nothing more to do, so that their loss need not end the run before its last checkpoint."""
    stand = evaluating(tmp_path, held=True, schedule__steps=1)
    stand.run.step = 1
    ending = asyncio.create_task(stand.run.evaluation_engines.begin(stand.run))
    await until(lambda: "evaluate 1" in stand.parts.done)
    stand.publications.lost.set()
    await asyncio.sleep(0.1)
    stand.client.go.set()
    assert (await asyncio.wait_for(ending, LIMIT_S))["eval/accuracy"] == 1.0
    await stand.run.evaluation_engines.cancel()
    await stopped(stand.run)


async def test_a_late_evaluation_is_lost_although_its_end_is_interrupted(tmp_path):
    leaving = asyncio.Event()
    stand = evaluating(tmp_path, held=True, leaving=leaving, schedule__steps=3, eval__deadline=0.1)
    assert await stand.run.evaluation_engines.begin(stand.run) == BEGUN
    stand.client.ends.clear()
    stand.run.step = 1
    beginning = asyncio.create_task(stand.run.evaluation_engines.begin(stand.run))
    await until(lambda: stand.client.cancelled == 3)
    leaving.set()
    assert await asyncio.wait_for(beginning, LIMIT_S) == BEGUN
    assert evaluated(tmp_path) == {0: [LOST]} and stand.told.events == [("evaluation_lost", "step 0")]
    await stand.run.evaluation_engines.cancel()
    assert numbers(" ".join(stand.notes[1:])) == [1, 0], "first the unfinished one, then the lost one"
    await stopped(stand.run)


async def test_an_answer_that_ignores_its_end_delays_training_briefly(tmp_path):
    """For example one of a hook that catches every error."""
    stand = evaluating(tmp_path, held=True, schedule__steps=1, eval__deadline=0.1)
    stand.client.ends.clear()
    await stand.train()
    assert "save 1" in stand.parts.done and evaluated(tmp_path) == {0: [BEGUN, LOST], 1: [LOST]}
    stand.client.ends.set()


async def test_nothing_is_lost_twice_when_the_run_is_asked_to_stop(tmp_path):
    leaving = asyncio.Event()
    stand = evaluating(tmp_path, held=True, leaving=leaving, schedule__steps=1, eval__deadline=5)
    assert await stand.run.evaluation_engines.begin(stand.run) == BEGUN
    stand.members.out.set()
    await until(lambda: len(stand.told.events) == 1)
    stand.members.out.clear()
    stand.run.step = 1
    ending = asyncio.create_task(stand.run.evaluation_engines.begin(stand.run))
    await until(lambda: "evaluate 1" in stand.parts.done)
    leaving.set()
    assert await asyncio.wait_for(ending, LIMIT_S) == {}
    assert stand.told.events == [("evaluation_lost", "step 0"), ("evaluation_lost", "step 1")]
    await stopped(stand.run)


async def test_an_evaluation_that_is_cancelled_before_it_runs_leaves_no_warning(tmp_path):
    stand = evaluating(tmp_path, schedule__steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert await stand.run.evaluation_engines.begin(stand.run) == BEGUN
        await stand.run.evaluation_engines.cancel()
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is RuntimeWarning] == []
    assert [numbers(note) for note in stand.notes] == [[0]], "it is not finished"
    await stopped(stand.run)
