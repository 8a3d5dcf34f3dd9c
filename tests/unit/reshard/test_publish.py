"""A publication reaches every engine whole and in order; an engine that fails is out, and the others do not notice."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest

from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.outcome import Publication
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.parties import Delivery, LocalRecipient, NoReceiverLeft, ReceiverLost, TransportLost
from slimx.reshard.publish import Publisher
from tests.refusals import numbers, refused

BUCKETS = [
    PackedBucket(
        "/proc/1/fd/3",
        96,
        ((PackedTensor("a", "float32", (2, 4), 0, 32, 0), PackedTensor("b", "float32", (8,), 64, 32, 0)),),
    ),
    PackedBucket("/proc/1/fd/4", 12, ((PackedTensor("c", "float32", (3,), 0, 12, 0),),)),
    PackedBucket("/proc/1/fd/5", 20, ((PackedTensor("d", "float32", (5,), 0, 20, 0),),)),
]
TENSORS = {"a": "float32:2,4", "b": "float32:8", "c": "float32:3", "d": "float32:5"}


class Calls(list[str]):
    """What happened, in order. A call in `fail` raises its error, one in `hang` never returns, one in `slow` takes a
    moment."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: dict[str, SlimxError] = {}
        self.hang: set[str] = set()
        self.slow: set[str] = set()

    async def note(self, name: str) -> None:
        self.append(name)
        if name in self.fail:
            raise self.fail[name]
        await asyncio.sleep(600 if name in self.hang else 0.02 if name in self.slow else 0)
        self.append(f"{name} done")

    def of(self, who: str) -> list[str]:
        begun = [call for call in self if not call.endswith(" done")]
        return [call.removeprefix(who + ".") for call in begun if call.startswith(who)]

    def at(self, name: str) -> int:
        assert name in self, name
        return self.index(name)


class FakeTrainers:
    def __init__(self, calls: Calls) -> None:
        self.calls, self.buckets = calls, BUCKETS

    async def begin(self, manifest: Manifest) -> None:
        await self.calls.note(f"trainers.begin {manifest.version}")

    async def forms(self) -> list[dict[str, str]]:
        await self.calls.note("trainers.forms")
        return [TENSORS]

    async def bucket_count(self) -> int:
        return len(BUCKETS)

    async def gather(self, bucket: int) -> PackedBucket:
        await self.calls.note(f"trainers.gather {bucket}")
        return self.buckets[bucket]

    async def release(self, bucket: int | None = None) -> None:
        await self.calls.note("trainers.release" if bucket is None else f"trainers.release {bucket}")


class FakeEngine(LocalRecipient):
    def __init__(self, name: str, calls: Calls, *inventory: dict[str, str], verified: int = 4) -> None:
        self.name, self.calls, self.verified, self.incarnation = name, calls, verified, 1
        self.known = list(inventory) or [TENSORS]
        self.manifest: Manifest | None = None

    async def inventory(self, encoding: str) -> list[dict[str, str]]:
        assert encoding == "hf"
        await self.calls.note(f"{self.name}.inventory")
        return self.known

    async def begin(self, manifest: Manifest, staging: str) -> None:
        self.manifest = manifest
        await self.calls.note(f"{self.name}.begin")

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        assert packed.targets is BUCKETS[bucket].targets
        await self.calls.note(f"{self.name}.stage {bucket}")

    async def abort(self) -> None:
        await self.calls.note(f"{self.name}.abort")

    async def pause(self) -> None:
        await self.calls.note(f"{self.name}.pause")

    async def load(self) -> None:
        await self.calls.note(f"{self.name}.load")

    async def verify(self) -> dict[str, int]:
        await self.calls.note(f"{self.name}.verify")
        return {"checked": self.verified}

    async def commit(self, version: int) -> None:
        await self.calls.note(f"{self.name}.commit {version}")

    async def resume(self) -> None:
        await self.calls.note(f"{self.name}.resume")


class Copies(Delivery):
    """A delivery that copies what it takes."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        await self.calls.note(f"copies.begin {buckets}")

    async def connect(self, recipient: FakeEngine, epoch: int) -> None:
        await self.calls.note(f"copies.connect {recipient.name}")

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        await self.calls.note(f"copies.take {bucket}")
        return replace(packed, path=f"/copy/{bucket}")

    async def bring(self, recipient: FakeEngine, epoch: int, packed: PackedBucket, bucket: int) -> None:
        assert packed.path == f"/copy/{bucket}"
        await super().bring(recipient, epoch, packed, bucket)

    async def end(self) -> None:
        await self.calls.note("copies.end")


class FakeMembers:
    def __init__(self, calls: Calls, engines: list[FakeEngine]) -> None:
        self.calls, self.engines, self.epoch = calls, engines, 5
        self.out: dict[str, SlimxError] = {}

    def candidates(self) -> list[FakeEngine]:
        return [engine for engine in self.engines if engine.name not in self.out]

    async def quarantine(self, engine: FakeEngine, error: SlimxError) -> None:
        self.out[engine.name] = error
        self.epoch += 1
        await self.calls.note(f"{engine.name}.quarantine")

    async def admit(self, engine: FakeEngine) -> None:
        await self.calls.note(f"{engine.name}.admit")


class Stand:
    """A publisher between fakes, two engines unless others are given."""

    def __init__(
        self,
        *engines: FakeEngine,
        calls: Calls | None = None,
        staging: str = "model",
        delivery: Delivery | None = None,
        vacated: bool = False,
        **deadlines: float,
    ):
        """`vacated`: source and engines share devices, which the source leaves."""
        self.calls = Calls() if calls is None else calls
        self.engines = list(engines) or [FakeEngine(name, self.calls) for name in ("e0", "e1")]
        self.members = FakeMembers(self.calls, self.engines)
        self.publisher = Publisher(
            FakeTrainers(self.calls),
            self.members,
            delivery,
            deadline_s=deadlines.get("deadline_s", 30),
            step_deadline_s=deadlines.get("step_deadline_s", 10),
            staging=staging,
            vacate=partial(self.calls.note, "trainers.leave") if vacated else None,
        )

    async def publish(self, version: int = 7) -> Publication:
        return await self.publisher.publish(version, trainer_step=version)


def lost(name: str) -> ReceiverLost:
    return ReceiverLost(f"engine {name} is gone")


def died(part: str) -> PartLost:
    return PartLost(f"{part} died", code="part.lost", about=part)


# Order ----------------------------------------------------------------------------------------------------------------

SWITCH = ["pause", "load", "verify", "commit 7", "resume", "admit"]
STAGES = ["stage 0", "stage 1", "stage 2"]


@pytest.mark.parametrize("staging", ["model", "bucket"])
async def test_the_source_leaves_shared_devices_before_the_first_engine_takes_the_rest_of_its_memory(staging):
    stand = Stand(staging=staging, vacated=True)
    stand.calls.slow.add("e1.verify")
    await stand.publish()
    calls = stand.calls
    left = calls.at("trainers.leave done")
    assert calls.at("trainers.release done") < calls.at("trainers.leave") and calls.count("trainers.leave") == 1
    for engine in ("e0", "e1"):
        assert calls.at(f"{engine}.commit 7 done") < left < calls.at(f"{engine}.resume") < calls.at(f"{engine}.admit")
    assert calls.of("trainers").count("release") == 1


async def test_an_engine_that_is_lost_before_the_source_leaves_does_not_keep_the_others_from_serving():
    stand = Stand(vacated=True)
    stand.calls.fail["e0.load"] = lost("e0")
    done = await stand.publish()
    assert done.lost == ["e0"] and stand.calls.of("e0")[-1] == "quarantine"
    assert stand.calls.of("e1")[-2:] == ["resume", "admit"]


@pytest.mark.parametrize(
    ("staging", "order"),
    [
        ("model", ["begin", *STAGES, *SWITCH]),
        ("bucket", ["begin", "pause", *[call for stage in STAGES for call in (stage, "load")], *SWITCH[2:]]),
    ],
)
async def test_every_engine_goes_through_the_stages_in_order(staging, order):
    stand = Stand(staging=staging)
    done = await stand.publish()
    for engine in ("e0", "e1"):
        assert stand.calls.of(engine) == ["inventory", *order]
    assert (done.tensors, done.nbytes, done.buckets, done.lost) == (4, 128, 3, [])
    assert {name: outcome.tensors for name, outcome in done.engines.items()} == {"e0": 4, "e1": 4}
    stages = {"check", "begin", "gather", "stage", "pause", "load", "verify", "commit", "total"}
    assert done.seconds.keys() == stages and all(0 <= s <= done.seconds["total"] for s in done.seconds.values())
    assert done.manifest == stand.engines[0].manifest and done.manifest.membership_epoch == 5
    assert stand.calls.of("trainers")[-1] == "release"


async def test_a_bucket_is_gathered_while_the_one_before_is_staged_and_two_are_in_memory_at_most():
    calls = Calls()
    calls.slow = {f"e{n}.stage {bucket}" for n in (0, 1) for bucket in range(3)}
    await Stand(calls=calls).publish()
    for bucket in (0, 1):
        gathered, staged = f"trainers.gather {bucket + 1}", f"e1.stage {bucket} done"
        assert calls.at(f"trainers.gather {bucket} done") < calls.at(f"e0.stage {bucket}")
        assert calls.at(gathered) < calls.at(staged), "gathered meanwhile"
    for engine in ("e0", "e1"):
        assert calls.at(f"{engine}.stage 0 done") < calls.at("trainers.gather 2")


async def test_with_bucket_staging_a_bucket_is_given_back_before_the_next_but_one_is_gathered():
    stand = Stand(staging="bucket")
    await stand.publish()
    assert stand.calls.at("e1.load done") < stand.calls.at("trainers.release 0") < stand.calls.at("trainers.gather 2")


async def test_a_bucket_on_a_device_is_given_back_as_soon_as_every_engine_has_its_copy():
    stand = Stand()
    stand.calls.slow = {"e1.stage 0"}
    stand.publisher.source.buckets = [replace(bucket, path="cuda-ipc:there") for bucket in BUCKETS]
    await stand.publish()
    assert (
        stand.calls.at("e1.stage 0 done") < stand.calls.at("trainers.release 0") < stand.calls.at("trainers.gather 2")
    )
    assert stand.calls.at("trainers.release 2") < stand.calls.at("e0.pause")


@pytest.mark.parametrize("staging", ["model", "bucket"])
async def test_the_source_gets_its_memory_back_as_soon_as_the_delivery_has_a_copy(staging):
    calls = Calls()
    await Stand(calls=calls, staging=staging, delivery=Copies(calls)).publish()
    buckets = [call for number in range(3) for call in (f"gather {number}", f"release {number}")]
    assert calls.of("trainers") == ["forms", "begin 7", *buckets, "release"]
    assert calls.of("copies") == ["begin 3", "connect e0", "connect e1", "take 0", "take 1", "take 2", "end"]
    assert calls.at("copies.connect e0 done") < calls.at("e0.begin")
    assert calls.at("copies.take 0 done") < calls.at("trainers.release 0")


async def test_a_delivery_is_told_of_the_end_of_a_publication_that_failed():
    calls = Calls()
    calls.fail["trainers.gather 1"] = SlimxError("no memory")
    with pytest.raises(SlimxError):
        await Stand(calls=calls, delivery=Copies(calls)).publish()
    assert calls.of("copies")[-1] == "end" and calls.at("trainers.release done") < calls.at("copies.end")


async def test_a_delivery_that_cannot_reach_an_engine_costs_that_engine_alone():
    calls = Calls()
    calls.fail["copies.connect e0"] = lost("e0")
    done = await Stand(calls=calls, delivery=Copies(calls)).publish()
    assert done.lost == ["e0"] and done.engines["e0"].step == "begin" and done.engines["e1"].tensors == 4


async def test_an_engine_that_is_ready_serves_although_another_one_still_copies():
    calls = Calls()
    calls.slow = {"e0.load"}
    await Stand(calls=calls).publish()
    assert calls.at("e1.admit") < calls.at("e0.load done")


async def test_names_are_asked_for_once_by_incarnation_and_not_at_every_publication():
    stand = Stand()
    await stand.publish(1)
    assert [stand.calls.of(engine).count("inventory") for engine in ("e0", "e1")] == [1, 1]
    stand.engines[1].incarnation += 1
    for version in (2, 3):
        await stand.publish(version)
        assert [stand.calls.of(engine).count("inventory") for engine in ("e0", "e1")] == [1, 2]


async def test_a_second_publication_while_one_runs_is_refused_and_does_not_disturb_it():
    stand = Stand()
    stand.calls.slow = {"e0.stage 1"}
    first = asyncio.create_task(stand.publish(7))
    while "e0.stage 1" not in stand.calls:
        await asyncio.sleep(0)
    with refused("publish.under_way", about="version 8"):
        await stand.publish(8)
    assert (await first).lost == [] and stand.calls.of("e0")[-1] == "admit"
    assert (await stand.publish(8)).manifest.version == 8


# An engine fails ------------------------------------------------------------------------------------------------------

STEPS = ["inventory", "begin", *STAGES, *SWITCH]


@pytest.mark.parametrize(
    ("step", "how"),
    [(step, how) for step in STEPS for how in ("refuses", "hangs") if (step, how) != ("admit", "hangs")],
)
async def test_an_engine_that_fails_in_any_step_is_quarantined_at_once_and_the_other_gets_the_version(step, how):
    stand = Stand(step_deadline_s=0.2 if how == "hangs" else 10)
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


async def test_an_engine_that_was_started_again_meanwhile_is_left_to_the_next_publication():
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


async def test_an_engine_that_verified_fewer_tensors_is_quarantined_and_never_serves():
    calls = Calls()
    stand = Stand(FakeEngine("e0", calls), FakeEngine("e1", calls, verified=3), calls=calls)
    done = await stand.publish()
    assert done.lost == ["e1"] and calls.of("e1")[-2:] == ["verify", "quarantine"]
    error = stand.members.out["e1"]
    assert (error.code, error.about, numbers(error)) == ("publish.unverified", "e1", [3, 4, 7])


async def test_a_hanging_engine_holds_the_others_for_one_step_only_and_not_at_all_once_they_copy():
    stand = Stand(step_deadline_s=0.2)
    stand.calls.hang.add("e0.load")
    publication = asyncio.create_task(stand.publish())
    while "e1.admit" not in stand.calls:
        await asyncio.sleep(0.001)
    assert "e0.quarantine" not in stand.calls
    assert (await publication).lost == ["e0"]


async def test_when_all_engines_are_lost_the_publication_says_so_and_may_be_tried_again():
    stand = Stand()
    stand.calls.fail |= {"e0.stage 1": lost("e0"), "e1.load": lost("e1")}
    with refused("publish.lost", about="version 7", kind=NoReceiverLeft) as caught:
        await stand.publish()
    assert all(str(error) in str(caught.value) for error in stand.calls.fail.values())
    assert stand.calls.of("trainers")[-1] == "release"
    with refused("publish.no_engine", about="version 7", kind=NoReceiverLeft):
        await stand.publish()


@pytest.mark.parametrize("count", [1, 2])
async def test_what_every_engine_refuses_is_tried_again_when_they_are_started_again(count):
    """With one engine, its own fault is every engine's: only a restart tells it from the trainers'."""
    calls = Calls()
    stand = Stand(*(FakeEngine(f"e{n}", calls) for n in range(count)), calls=calls)
    calls.fail |= {f"e{n}.stage 1": SlimxError(f"engine e{n}: wrong checksum of tensor c") for n in range(count)}
    with pytest.raises(NoReceiverLeft) as told:
        await stand.publish()
    assert (told.value.code, told.value.about) == ("publish.refused", "stage")
    assert len(stand.members.out) == count, "all of them are started again"
    calls.fail.clear()
    stand.members.out.clear()
    assert (await stand.publish()).lost == []


@pytest.mark.parametrize("step", ["begin", "stage 1"])
async def test_a_courier_that_dies_costs_no_engine_and_the_version_can_be_published_again(step):
    stand = Stand()
    died = TransportLost("the courier died")
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
    inventory, code, about, told = WRONG[case]
    calls = Calls()
    stand = Stand(FakeEngine("e0", calls), FakeEngine("e1", calls, *inventory), calls=calls)
    for _ in range(2):  # and again at the next publication: a refusal is not remembered as a check
        with refused(code, about=about) as caught:
            await stand.publish()
        assert all(each in str(caught.value) for each in told)
        assert not [call for call in calls if "gather" in call or "begin" in call]
    assert stand.members.out == {}


# The trainers fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["forms", "begin 7", "gather 0", "gather 2"])
async def test_a_failure_of_the_trainers_ends_the_publication_and_changes_no_engine(step):
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
async def test_trainers_that_hang_are_told_by_name_and_stage(step, stage):
    stand = Stand(deadline_s=0.1)
    stand.calls.hang.add(f"trainers.{step}")
    with pytest.raises(DeadlineError) as caught:
        async with asyncio.timeout(60):
            await stand.publish()
    assert {"7", stage} <= set(caught.value.awaited.replace(",", "").split()) and "trainers" in caught.value.holder


async def test_engines_are_not_blamed_for_time_that_was_spent_before_they_were_asked():
    stand = Stand(deadline_s=0.015)
    stand.calls.slow = {"e0.stage 2", "e1.stage 2"}  # answered, in more than what was left
    with pytest.raises(DeadlineError) as caught:
        await stand.publish()
    assert numbers(caught.value.awaited) == [7] and {"pause", "e0"} <= set(caught.value.holder.split())
    assert stand.members.out == {}


async def test_no_call_to_an_engine_is_under_way_when_the_abort_comes():
    """Else it would stage a bucket after its abort."""
    stand = Stand()
    stand.calls.slow = {"e1.stage 0"}
    stand.calls.fail["trainers.gather 1"] = died("rank 3")
    with refused("part.lost", about="rank 3"):
        await stand.publish()
    assert stand.calls.at("e1.stage 0 done") < stand.calls.at("e1.abort")


async def test_engines_that_hang_in_their_abort_cannot_hold_a_failed_publication():
    stand = Stand(deadline_s=0.1)
    stand.calls.hang |= {"e0.abort", "trainers.release"}
    stand.calls.fail["trainers.gather 0"] = died("rank 3")
    began = time.monotonic()
    with refused("part.lost", about="rank 3"):
        await stand.publish()
    assert time.monotonic() - began < 60


# Manifest -------------------------------------------------------------------------------------------------------------


def test_a_manifest_survives_json_and_refuses_what_makes_no_sense():
    manifest = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3, rule="ue8m0", encoding="local")
    assert Manifest.from_json(manifest.to_json()) == manifest
    for change in ("rule", "colour"):
        values = manifest.to_json()
        values.pop(change) if change in values else values.update({change: 1})
        with refused("manifest.key", about=change):
            Manifest.from_json(values)
    with refused("manifest.value", about="encoding"):
        Manifest.from_json(manifest.to_json() | {"encoding": "raw"})
