"""Shared by the tests of publications: trainers and engines that note what they are asked, and fail on demand."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest, Publication
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.parties import Delivery, ReceiverLost
from slimx.reshard.publish import Publisher

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
    """Names of the calls, in order. A call in `fail` raises its error, one in `hang` never returns, one in `slow` takes
    a moment."""

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


class FakeEngine:
    """An engine that notes the verbs of its publications, with the number of a bucket or version."""

    def __init__(self, name: str, calls: Calls, *inventory: dict[str, str], verified: int = 4) -> None:
        self.name, self.calls, self.incarnation = name, calls, 1
        self.answers = {"inventory": list(inventory) or [TENSORS], "verify": {"checked": verified}}
        self.manifest: Manifest | None = None

    async def perform(self, verb: str, epoch: int, *arguments: Any) -> Any:
        label = f"{self.name}.{verb}"
        match verb, arguments:
            case "inventory", (encoding,):
                assert encoding == "hf"
            case "begin", (manifest, _):
                self.manifest = manifest
            case "stage", (packed, bucket):
                assert packed.targets is BUCKETS[bucket].targets
                label += f" {bucket}"
            case "commit", (version,):
                label += f" {version}"
        await self.calls.note(label)
        return self.answers.get(verb)


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
            step_deadline_s=deadlines.get("step_deadline_s", 300),
            staging=staging,
            vacate=partial(self.calls.note, "trainers.leave") if vacated else None,
        )

    async def publish(self, version: int = 7) -> Publication:
        return await self.publisher.publish(version, trainer_step=version)


def lost(name: str) -> ReceiverLost:
    return ReceiverLost(f"engine {name} is gone")


SWITCH = ["pause", "load", "verify", "commit 7", "resume", "admit"]
STAGES = ["stage 0", "stage 1", "stage 2"]
