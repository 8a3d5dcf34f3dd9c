"""An engine that fails in a publication is out, and the others do not notice; trainers that fail change no engine."""

from __future__ import annotations

import asyncio

import pytest

from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.reshard.parties import NoReceiverLeft, ReceiverLost, TransportLost
from tests.refusals import numbers, refused
from tests.unit.reshard.publication_stand import STAGES, SWITCH, TENSORS, Calls, FakeEngine, Stand, lost
from tests.virtual_time import virtually


def died(part: str) -> PartLost:
    return PartLost(f"{part} died", code="part.lost", about=part)


STEPS = ["inventory", "begin", *STAGES, *SWITCH]


@pytest.mark.parametrize(
    ("step", "how"),
    [(step, how) for step in STEPS for how in ("refuses", "hangs") if (step, how) != ("admit", "hangs")],
)
@virtually
async def test_an_engine_that_fails_in_any_step_is_quarantined_alone(step, how):
    stand = Stand(step_deadline_s=0.2 if how == "hangs" else 300)
    if how == "refuses":
        stand.calls.fail[f"e1.{step}"] = SlimxError("it will not")
    else:
        stand.calls.hang.add(f"e1.{step}")
    done = await stand.publish()
    assert done.lost == ["e1"] and done.engines["e1"].tensors == 0 and done.engines["e0"].tensors == 4
    assert stand.calls.of("e1")[-2:] == [step, "quarantine"], "nothing is asked of it any more"
    assert stand.calls.of("e0") == STEPS
    error = stand.members.out["e1"]
    if how == "refuses":
        assert error is stand.calls.fail[f"e1.{step}"]
    else:
        assert isinstance(error, ReceiverLost) and (error.code, error.about) == ("engine.silent", "e1")
        assert done.engines["e1"].step == step.split()[0]
    assert (await stand.publish(8)).engines.keys() == {"e0"}


@virtually
async def test_a_restarted_engine_waits_for_the_next_publication():
    stand = Stand()
    stand.calls.slow = {"e0.stage 0"}
    publication = asyncio.create_task(stand.publish())
    while "e0.stage 0" not in stand.calls:
        await asyncio.sleep(0)
    stand.engines[1].incarnation += 1
    done = await publication
    error = done.engines["e1"].error
    assert done.lost == ["e1"] and (error.code, error.about) == ("engine.restarted", "e1")
    assert stand.calls.of("e1")[-1] == "stage 0" and stand.members.out == {}
    assert (await stand.publish(8)).lost == [] and stand.calls.of("e1")[-1] == "admit"


async def test_an_engine_that_verified_fewer_tensors_never_serves():
    calls = Calls()
    stand = Stand(FakeEngine("e0", calls), FakeEngine("e1", calls, verified=3), calls=calls)
    done = await stand.publish()
    assert done.lost == ["e1"] and calls.of("e1")[-2:] == ["verify", "quarantine"]
    error = stand.members.out["e1"]
    assert (error.code, error.about, numbers(error)) == ("publish.unverified", "e1", [3, 4, 7])


@virtually
async def test_a_hanging_engine_delays_the_others_by_one_step_only():
    stand = Stand(step_deadline_s=0.2)
    stand.calls.hang.add("e0.load")
    publication = asyncio.create_task(stand.publish())
    while "e1.admit" not in stand.calls:
        await asyncio.sleep(0.001)
    assert "e0.quarantine" not in stand.calls
    assert (await publication).lost == ["e0"]


async def test_a_publication_without_engines_left_may_be_repeated():
    stand = Stand()
    stand.calls.fail |= {"e0.stage 1": lost("e0"), "e1.load": lost("e1")}
    with refused("publish.lost", about="version 7", kind=NoReceiverLeft) as caught:
        await stand.publish()
    assert all(str(error) in str(caught.value) for error in stand.calls.fail.values())
    assert stand.calls.of("trainers")[-1] == "release"
    with refused("publish.no_engine", about="version 7", kind=NoReceiverLeft):
        await stand.publish()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_refusal_by_every_engine_is_repeated_after_restarts(count):
    """With one engine, its own fault is every engine's: only a restart tells it from the trainers'."""
    calls = Calls()
    stand = Stand(*(FakeEngine(f"e{n}", calls) for n in range(count)), calls=calls)
    calls.fail |= {f"e{n}.stage 1": SlimxError(f"engine e{n}: wrong checksum of tensor c") for n in range(count)}
    with pytest.raises(NoReceiverLeft) as caught:
        await stand.publish()
    assert (caught.value.code, caught.value.about) == ("publish.refused", "stage")
    assert len(stand.members.out) == count, "all of them are started again"
    calls.fail.clear()
    stand.members.out.clear()
    assert (await stand.publish()).lost == []


@pytest.mark.parametrize("step", ["begin", "stage 1"])
async def test_dead_trainer_ranks_cost_no_engine(step):
    stand = Stand()
    died = TransportLost("a trainer rank died")
    stand.calls.fail |= {f"e{n}.{step}": died for n in (0, 1)}
    with pytest.raises(TransportLost):
        await stand.publish()
    assert stand.members.out == {} and stand.members.epoch == 5
    assert all(stand.calls.of(engine)[-1] == "abort" for engine in ("e0", "e1"))
    stand.calls.fail.clear()
    assert (await stand.publish()).lost == []


async def test_a_mistake_in_a_receiver_is_not_taken_for_a_lost_engine():
    stand = Stand()
    stand.calls.fail["e1.load"] = mistake = TypeError("a mistake of ours")  # type: ignore[assignment]
    with pytest.raises(TypeError) as caught:
        await stand.publish()
    assert caught.value is mistake and stand.members.out == {}


WRONG = {
    "unknown name": ([{"a": "float32:2,4", "c": "float32:3"}], "publish.unknown", "b", ["e1"]),
    "other shape": (
        [TENSORS | {"a": "float32:4,2"}],
        "publish.form",
        "a",
        ["e1", "float32:4,2", "float32:2,4"],
    ),
    "other dtype": ([TENSORS | {"c": "bfloat16:3"}], "publish.form", "c", ["e1", "bfloat16:3", "float32:3"]),
    "never sent": ([TENSORS | {"e": "float32:1"}], "publish.missing", "e", ["e1"]),
    "other ranks": ([TENSORS, TENSORS], "publish.ranks", "e1", ["2", "1"]),
}


@pytest.mark.parametrize("case", WRONG)
async def test_an_engine_of_another_model_ends_the_run_before_the_first_byte(case):
    """Not quarantined: it would come back with the same model."""
    inventory, code, about, texts = WRONG[case]
    calls = Calls()
    stand = Stand(FakeEngine("e0", calls), FakeEngine("e1", calls, *inventory), calls=calls)
    for _ in range(2):  # and again at the next publication: a refusal is not remembered as a check
        with refused(code, about=about) as caught:
            await stand.publish()
        assert all(text in str(caught.value) for text in texts)
        assert not [call for call in calls if "gather" in call or "begin" in call]
    assert stand.members.out == {}


@pytest.mark.parametrize("step", ["forms", "begin 7", "gather 0", "gather 2"])
async def test_a_failure_of_the_trainers_changes_no_engine(step):
    stand = Stand()
    stand.calls.fail[f"trainers.{step}"] = died("rank 3")
    with refused("part.lost", about="rank 3"):
        await stand.publish()
    for engine in ("e0", "e1"):
        assert stand.calls.of(engine)[-1] == "abort" and not {"pause", "load"} & set(stand.calls.of(engine))
    assert stand.members.out == {} and "trainers.release" in stand.calls


@pytest.mark.parametrize(
    ("step", "stage"), [("forms", "check"), ("begin 7", "begin"), ("gather 1", "gather"), ("release", "release")]
)
@virtually
async def test_trainers_that_hang_are_reported_by_rank_and_stage(step, stage):
    stand = Stand(deadline_s=0.1)
    stand.calls.hang.add(f"trainers.{step}")
    with pytest.raises(DeadlineError) as caught:
        await stand.publish()
    assert {"7", stage} <= set(caught.value.awaited.replace(",", "").split()) and "trainers" in caught.value.holder


@virtually
async def test_engines_are_not_blamed_for_time_before_their_call():
    stand = Stand(deadline_s=0.015)
    stand.calls.slow = {"e0.stage 2", "e1.stage 2"}  # answered, in more than what was left
    with pytest.raises(DeadlineError) as caught:
        await stand.publish()
    assert numbers(caught.value.awaited) == [7] and {"pause", "e0"} <= set(caught.value.holder.split())
    assert stand.members.out == {}


@virtually
async def test_no_engine_call_is_in_flight_during_an_abort():
    """Else it would stage a bucket after its abort."""
    stand = Stand()
    stand.calls.slow = {"e1.stage 0"}
    stand.calls.fail["trainers.gather 1"] = died("rank 3")
    with refused("part.lost", about="rank 3"):
        await stand.publish()
    assert stand.calls.at("e1.stage 0 done") < stand.calls.at("e1.abort")


@virtually
async def test_engines_that_hang_in_their_abort_cannot_hold_a_failed_publication():
    stand = Stand(deadline_s=0.1)
    stand.calls.hang |= {"e0.abort", "trainers.release"}
    stand.calls.fail["trainers.gather 0"] = died("rank 3")
    with refused("part.lost", about="rank 3"):
        await stand.publish()
    assert asyncio.get_running_loop().time() < 1
