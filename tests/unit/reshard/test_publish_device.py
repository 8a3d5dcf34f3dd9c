"""Whole publications through two buckets of a device: what engines hold is right, whatever other engines do meanwhile.

Trainer ranks, publisher and engines are in this process, on the emulated device (cuda_stand); the engines open, copy
and prove buckets by the receiver's own functions.
"""

from __future__ import annotations

import asyncio
import ctypes
from itertools import chain
from pathlib import Path

import pytest
import torch

from slimx.adapters.sglang.weights.buckets import open_bucket
from slimx.adapters.sglang.weights.places import Destination, LocalPart, staged_sums
from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.parts import matrix
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.gather_device import SLOTS, DeviceGatherer
from slimx.reshard.pack.packer import Packer, describe
from slimx.reshard.packed import PUBLISHER, PackedBucket
from slimx.reshard.parties import LocalRecipient, NoReceiverLeft, Staging
from slimx.reshard.publish import Publisher
from tests.refusals import refused
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import Tensors, checkpoint, trainer_shards
from tests.unit.reshard.cuda_stand import DEVICE, use_emulator
from tests.unit.reshard.gather_stand import ENGINE, MODEL, SIZES, dressed, plan


@pytest.fixture(autouse=True)
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return use_emulator(emulator_library, monkeypatch)


class Trainers:
    """All ranks, each with its gatherer."""

    def __init__(self) -> None:
        self.shards = [dressed(tensors) for tensors in trainer_shards(MODEL, SIZES)]
        packers = [
            Packer(plan(bucket_bytes=6_000), rank, tensors, apart=True) for rank, tensors in enumerate(self.shards)
        ]
        self.ranks = [DeviceGatherer(packer, remote=(), group=None, holders=len(packers)) for packer in packers]
        self.most = 0
        """Buckets that were held at once."""

    def scale(self, factor: float) -> None:
        for tensors in self.shards:
            for tensor in tensors.values():
                tensor.mul_(factor)

    async def begin(self, manifest: Manifest) -> None: ...

    async def forms(self) -> list[dict[str, str]]:
        return [{}] * ENGINE.world

    async def bucket_count(self) -> int:
        return self.ranks[PUBLISHER].packer.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        opened = dict(chain.from_iterable(rank.open(bucket).items() for rank in self.ranks))
        paths = [opened[part] for part in sorted(opened)]
        self.most = max(self.most, *(len(rank._memories) for rank in self.ranks))
        await asyncio.sleep(0)
        form = self.ranks[PUBLISHER].packer.form(bucket)
        return describe(form, paths, [rank.fill(bucket, paths) for rank in self.ranks])

    async def release(self, bucket: int | None = None) -> None:
        for rank in self.ranks:
            rank.release(bucket)


class Engine(LocalRecipient):
    """All ranks of one. `spoil` is the bucket of which it meets a changed byte, `hang` the one that it never takes."""

    incarnation = 1

    def __init__(self, name: str, trainers: Trainers):
        self.name, self.trainers, self.spoil, self.hang = name, trainers, -1, -1
        self.staged: list[Tensors] = []
        self.loaded: list[Tensors] = [{} for _ in range(ENGINE.world)]

    async def inventory(self, encoding: str) -> list[dict[str, str]]:
        return [{}] * ENGINE.world

    async def begin(self, manifest: Manifest, staging: Staging) -> None:
        self.staged = [{} for _ in range(ENGINE.world)]

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        await asyncio.sleep(600 if bucket == self.hang else 0)
        for rank, tensors in enumerate(packed.targets):
            entries = [tensor.to_json() for tensor in tensors]
            path = (packed.path, *packed.others)[rank]
            views, device = open_bucket(path, packed.size, entries, DEVICE)
            if bucket == self.spoil and views:
                next(iter(views.values())).view(torch.uint8)[..., 0] ^= 1
            sums = staged_sums(views, {name: place_of(view) for name, view in views.items()}, device)
            for tensor in tensors:
                if sums[tensor.name][0] != tensor.checksum:
                    raise SlimxError(f"{tensor.name} of {self.name}", code="engine.checksum", about=tensor.name)
            self.staged[rank] |= views

    async def load(self) -> None:
        for loaded, staged in zip(self.loaded, self.staged, strict=True):
            loaded |= {name: view.clone() for name, view in staged.items()}
        self.staged = [{} for _ in range(ENGINE.world)]

    async def verify(self) -> dict[str, int]:
        return {"checked": sum(len(loaded) for loaded in self.loaded)}

    async def abort(self) -> None: ...

    async def pause(self) -> None: ...

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...


def place_of(view: torch.Tensor) -> Destination:
    """Returns the place of a tensor that a rank holds as a whole."""
    shape = tuple(view.shape)
    return Destination(view.dtype, shape, [LocalPart("", shape, (Rect(0, 0, 0, *matrix(shape), 0, 0),))])


class Members:
    def __init__(self, engines: list[Engine]):
        self.engines, self.epoch, self.out = engines, 0, set[str]()

    def candidates(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.name not in self.out]

    async def quarantine(self, engine: Engine, error: SlimxError) -> None:
        self.out.add(engine.name)
        self.epoch += 1

    async def admit(self, engine: Engine) -> None: ...


def assert_holds(engine: Engine, factor: float) -> None:
    for rank in range(ENGINE.world):
        expected = dressed(engine_rank(SERVED["qwen"], checkpoint(MODEL), ENGINE, rank))
        assert engine.loaded[rank].keys() == expected.keys()
        for name, tensor in expected.items():
            assert engine.loaded[rank][name].equal((tensor * factor).bfloat16()), name


@pytest.mark.parametrize("staging", ["model", "bucket"])
async def test_engines_get_whole_versions_while_others_are_late_or_refuse(staging: Staging) -> None:
    trainers = Trainers()
    good, bad, late = engines = [Engine(name, trainers) for name in ("good", "bad", "late")]
    members = Members(engines)
    publisher = Publisher(trainers, members, deadline_s=60, step_deadline_s=30, staging=staging, encoding="local")
    assert (await publisher.publish(1, trainer_step=1)).lost == []
    for engine in engines:
        assert_holds(engine, 1)

    trainers.scale(2)
    bad.spoil, late.hang, publisher.step_deadline_s = 1, 2, 2
    done = await publisher.publish(2, trainer_step=2)
    assert set(done.lost) == {"bad", "late"} and done.engines["bad"].error.code == "engine.checksum"
    assert_holds(good, 2)

    # Given up in the middle: two buckets were held, and the next publication finds memory for its own.
    trainers.scale(2)
    good.spoil = 1
    with refused("publish.refused", about="stage"):
        await publisher.publish(3, trainer_step=3)
    members.out.clear()
    good.spoil, good.hang = -1, 0
    members.out |= {"bad", "late"}
    with pytest.raises(NoReceiverLeft):
        await publisher.publish(3, trainer_step=3)
    members.out.clear()
    good.hang = bad.spoil = late.hang = -1
    assert (await publisher.publish(3, trainer_step=3)).lost == []
    for engine in engines:
        assert_holds(engine, 4)
    assert trainers.most == SLOTS and len(trainers.ranks[PUBLISHER]._free) == SLOTS
    trainers.ranks[PUBLISHER].close()
