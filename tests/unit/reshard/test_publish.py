"""A publication reaches every engine whole and in order, and holds no more memory than it says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery
from tests.refusals import refused
from tests.unit.reshard.publication_stand import BUCKETS, STAGES, SWITCH, Calls, FakeEngine, Stand, lost


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


@pytest.mark.parametrize("staging", ["model", "bucket"])
async def test_the_source_leaves_shared_devices_before_engines_need_them(staging):
    stand = Stand(staging=staging, vacated=True)
    stand.calls.slow.add("e1.verify")
    await stand.publish()
    calls = stand.calls
    left = calls.at("trainers.leave done")
    assert calls.at("trainers.release done") < calls.at("trainers.leave") and calls.count("trainers.leave") == 1
    for engine in ("e0", "e1"):
        assert calls.at(f"{engine}.commit 7 done") < left < calls.at(f"{engine}.resume") < calls.at(f"{engine}.admit")
    assert calls.of("trainers").count("release") == 1


async def test_an_engine_lost_before_the_source_leaves_does_not_block_others():
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
    assert (done.tensors, done.nbytes, done.buckets, done.lost) == (4, 96, 3, [])
    assert {name: outcome.tensors for name, outcome in done.engines.items()} == {"e0": 4, "e1": 4}
    stages = {"check", "begin", "gather", "stage", "pause", "load", "verify", "commit", "total"}
    assert done.seconds.keys() == stages and all(0 <= s <= done.seconds["total"] for s in done.seconds.values())
    assert done.manifest == stand.engines[0].manifest and done.manifest.membership_epoch == 5
    assert stand.calls.of("trainers")[-1] == "release"


async def test_a_bucket_is_gathered_while_the_previous_one_is_staged():
    calls = Calls()
    calls.slow = {f"e{n}.stage {bucket}" for n in (0, 1) for bucket in range(3)}
    await Stand(calls=calls).publish()
    for bucket in (0, 1):
        gathered, staged = f"trainers.gather {bucket + 1}", f"e1.stage {bucket} done"
        assert calls.at(f"trainers.gather {bucket} done") < calls.at(f"e0.stage {bucket}")
        assert calls.at(gathered) < calls.at(staged), "gathered meanwhile"
    for engine in ("e0", "e1"):
        assert calls.at(f"{engine}.stage 0 done") < calls.at("trainers.gather 2")


async def test_with_bucket_staging_a_bucket_is_released_before_the_next_but_one():
    stand = Stand(staging="bucket")
    await stand.publish()
    assert stand.calls.at("e1.load done") < stand.calls.at("trainers.release 0") < stand.calls.at("trainers.gather 2")


async def test_a_device_bucket_is_released_when_every_engine_has_its_copy():
    stand = Stand()
    stand.calls.slow = {"e1.stage 0"}
    stand.publisher.source.buckets = [replace(bucket, path="cuda-ipc:there") for bucket in BUCKETS]
    await stand.publish()
    assert (
        stand.calls.at("e1.stage 0 done") < stand.calls.at("trainers.release 0") < stand.calls.at("trainers.gather 2")
    )
    assert stand.calls.at("trainers.release 2") < stand.calls.at("e0.pause")


@pytest.mark.parametrize("staging", ["model", "bucket"])
async def test_the_source_gets_memory_back_when_the_delivery_has_a_copy(staging):
    calls = Calls()
    await Stand(calls=calls, staging=staging, delivery=Copies(calls)).publish()
    buckets = [call for number in range(3) for call in (f"gather {number}", f"release {number}")]
    assert calls.of("trainers") == ["forms", "begin 7", *buckets, "release"]
    assert calls.of("copies") == ["begin 3", "connect e0", "connect e1", "take 0", "take 1", "take 2", "end"]
    assert calls.at("copies.connect e0 done") < calls.at("e0.begin")
    assert calls.at("copies.take 0 done") < calls.at("trainers.release 0")


async def test_a_delivery_is_ended_when_its_publication_fails():
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


async def test_names_are_requested_once_per_incarnation():
    stand = Stand()
    await stand.publish(1)
    assert [stand.calls.of(engine).count("inventory") for engine in ("e0", "e1")] == [1, 1]
    stand.engines[1].incarnation += 1
    for version in (2, 3):
        await stand.publish(version)
        assert [stand.calls.of(engine).count("inventory") for engine in ("e0", "e1")] == [1, 2]


async def test_a_second_publication_is_refused_while_one_runs():
    stand = Stand()
    stand.calls.slow = {"e0.stage 1"}
    first = asyncio.create_task(stand.publish(7))
    while "e0.stage 1" not in stand.calls:
        await asyncio.sleep(0)
    with refused("publish.under_way", about="version 8"):
        await stand.publish(8)
    assert (await first).lost == [] and stand.calls.of("e0")[-1] == "admit"
    assert (await stand.publish(8)).manifest.version == 8


def test_a_manifest_survives_json_and_refuses_what_makes_no_sense():
    manifest = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3, rule="ue8m0", encoding="local")
    assert Manifest.from_json(manifest.to_json()) == manifest
    for change in ("rule", "color"):
        values = manifest.to_json()
        values.pop(change) if change in values else values.update({change: 1})
        with refused("manifest.key", about=change):
            Manifest.from_json(values)
    with refused("manifest.value", about="encoding"):
        Manifest.from_json(manifest.to_json() | {"encoding": "raw"})
