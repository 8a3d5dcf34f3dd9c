"""A publication reaches every engine whole and in order, or the engines do not serve; buckets carry each byte once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimx.errors import DeadlineError, SlimxError
from slimx.layout.ranks import Sizes, coordinates
from slimx.layout.table import matrix
from slimx.models.qwen3_moe import weight_table
from slimx.reshard import reference
from slimx.reshard.buckets import ALIGNMENT, Contributions, make_buckets
from slimx.reshard.gather import Gatherer, PackedBucket, PackedTensor
from slimx.reshard.publish import Publisher

BUCKETS = [
    PackedBucket(
        "/proc/1/fd/3",
        96,
        (PackedTensor("a", "float32", (2, 4), 0, 32, 0), PackedTensor("b", "float32", (8,), 64, 32, 0)),
    ),
    PackedBucket("/proc/1/fd/4", 12, (PackedTensor("c", "float32", (3,), 0, 12, 0),)),
]
TENSORS = {"a": "float32:2,4", "b": "float32:8", "c": "float32:3"}


class Calls(list[str]):
    """What happened, in order. The call named `fail` raises, the call named `hang` never returns."""

    fail = hang = ""

    async def note(self, name: str) -> None:
        self.append(name)
        if name == self.fail:
            raise SlimxError(f"{name} failed")
        if name == self.hang:
            await asyncio.sleep(600)

    def of(self, engine: str) -> list[str]:
        return [call.removeprefix(engine + ".") for call in self if call.startswith(engine)]

    def first(self, name: str) -> int:
        return min(i for i, call in enumerate(self) if call.endswith(name))

    def last(self, name: str) -> int:
        return max(i for i, call in enumerate(self) if call.endswith(name))


class FakeSource:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def tensors(self) -> dict[str, str]:
        await self.calls.note("tensors")
        return TENSORS

    async def bucket_count(self) -> int:
        return len(BUCKETS)

    async def gather(self, bucket: int) -> PackedBucket:
        await self.calls.note(f"gather {bucket}")
        return BUCKETS[bucket]

    async def release(self) -> None:
        await self.calls.note("release")


class FakeReceiver:
    def __init__(self, name: str, calls: Calls, inventory: dict[str, str] | None = None, verified: int = 3) -> None:
        self.name, self.calls, self.verified = name, calls, verified
        self.known = TENSORS if inventory is None else inventory

    async def inventory(self) -> dict[str, str]:
        await self.calls.note(f"{self.name}.inventory")
        return self.known

    async def pause(self) -> None:
        await self.calls.note(f"{self.name}.pause")

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        assert packed is BUCKETS[bucket]
        await self.calls.note(f"{self.name}.stage {bucket}")

    async def abort(self) -> None:
        await self.calls.note(f"{self.name}.abort")

    async def load(self) -> None:
        await self.calls.note(f"{self.name}.load")

    async def verify(self) -> int:
        await self.calls.note(f"{self.name}.verify")
        return self.verified

    async def commit(self, version: int) -> None:
        await self.calls.note(f"{self.name}.commit {version}")

    async def resume(self) -> None:
        await self.calls.note(f"{self.name}.resume")


def publisher(calls: Calls, *receivers: FakeReceiver, deadline_s: float = 30.0) -> Publisher:
    engines = receivers or (FakeReceiver("e0", calls), FakeReceiver("e1", calls))
    return Publisher(FakeSource(calls), engines, deadline_s)


# Order ----------------------------------------------------------------------------------------------------------------


async def test_a_publication_goes_through_its_stages_in_order():
    calls = Calls()
    done = await publisher(calls, FakeReceiver("e0", calls)).publish(7)
    staged = ["tensors", "e0.inventory", "gather 0", "e0.stage 0", "gather 1", "e0.stage 1"]
    assert calls == [*staged, "e0.pause", "e0.load", "e0.verify", "e0.commit 7", "e0.resume", "release"]
    assert (done.version, done.tensors, done.nbytes, done.buckets) == (7, 3, 108, 2)
    assert set(done.seconds) == {"check", "gather", "stage", "pause", "load", "verify", "commit"}


async def test_no_engine_begins_a_stage_before_all_have_ended_the_one_before():
    calls = Calls()

    class Slow(FakeReceiver):
        async def stage(self, packed: PackedBucket, bucket: int) -> None:
            await asyncio.sleep(0.01)
            await super().stage(packed, bucket)

        async def verify(self) -> int:
            await asyncio.sleep(0.01)
            return await super().verify()

    await publisher(calls, FakeReceiver("e0", calls), Slow("e1", calls)).publish(7)
    order = ["gather 0", "stage 0", "gather 1", "stage 1", "pause", "load", "verify", "commit 7", "resume", "release"]
    for before, after in zip(order, order[1:], strict=False):
        assert calls.last(before) < calls.first(after), (before, after)
    assert calls.of("e0") == calls.of("e1")


async def test_names_are_asked_for_once_and_not_at_every_publication():
    calls = Calls()
    publishing = publisher(calls)
    await publishing.publish(1)
    assert calls.count("e0.inventory") == calls.count("e1.inventory") == 1
    del calls[:]
    await publishing.publish(2)
    assert "e0.inventory" not in calls and calls.of("e1")[-2:] == ["commit 2", "resume"]


# Failures -------------------------------------------------------------------------------------------------------------

BEFORE_LOAD = ["gather 0", "gather 1", "e0.stage 0", "e1.stage 1", "e0.pause", "e1.pause"]
FROM_LOAD = ["e0.load", "e1.load", "e0.verify", "e1.verify", "e1.commit 7"]


@pytest.mark.parametrize("fail", BEFORE_LOAD)
async def test_a_failure_before_the_first_copy_aborts_everywhere_and_loads_nothing(fail):
    calls = Calls()
    calls.fail = fail
    with pytest.raises(SlimxError, match=f"{fail} failed"):
        await publisher(calls).publish(7)
    for engine in ("e0", "e1"):
        did = calls.of(engine)
        assert did.count("abort") == 1 and not {"load", "verify", "commit 7", "resume"} & set(did)
    assert calls.first("abort") < calls.first("release") == len(calls) - 1


@pytest.mark.parametrize("fail", ["tensors", "e1.inventory"])
async def test_a_failure_before_the_first_bucket_leaves_engines_as_they_are(fail):
    calls = Calls()
    calls.fail = fail
    with pytest.raises(SlimxError, match=f"{fail} failed"):
        await publisher(calls).publish(7)
    assert set(calls) <= {"tensors", "e0.inventory", "e1.inventory"}


@pytest.mark.parametrize("fail", FROM_LOAD)
async def test_from_the_first_copy_on_a_failure_leaves_every_engine_without_service(fail):
    calls = Calls()
    calls.fail = fail
    with pytest.raises(SlimxError, match=f"{fail} failed"):
        await publisher(calls).publish(7)
    assert "e0.load" in calls
    assert not [call for call in calls if call.endswith("resume")]
    assert calls[-1] == "release"


async def test_the_error_that_stopped_a_publication_is_told_even_if_the_abort_fails_too():
    calls = Calls()
    calls.fail = "e0.stage 0"

    class Gone(FakeReceiver):
        async def abort(self) -> None:
            await super().abort()
            raise SlimxError("the engine is gone")

    with pytest.raises(SlimxError, match=r"e0\.stage 0 failed"):
        await publisher(calls, FakeReceiver("e0", calls), Gone("e1", calls)).publish(7)
    assert "e0.abort" in calls and "e1.abort" in calls


async def test_no_call_to_another_engine_is_under_way_when_the_abort_comes():
    """Else it would stage a bucket after its abort, or copy weights while the run is being taken down."""
    calls = Calls()
    calls.fail = "e0.stage 0"

    class Slow(FakeReceiver):
        async def stage(self, packed: PackedBucket, bucket: int) -> None:
            try:
                await asyncio.sleep(0.05)
            finally:
                calls.append(f"{self.name}.left stage")

    with pytest.raises(SlimxError, match=r"e0\.stage 0 failed"):
        await publisher(calls, FakeReceiver("e0", calls), Slow("e1", calls)).publish(7)
    assert calls.of("e1") == ["inventory", "left stage", "abort"]


async def test_an_engine_that_verified_fewer_tensors_is_refused_by_name_and_never_serves():
    calls = Calls()
    receivers = FakeReceiver("e0", calls), FakeReceiver("e1", calls, verified=2)
    with pytest.raises(SlimxError, match="engine e1 verified 2 of 3 tensors of version 7; it must not serve"):
        await publisher(calls, *receivers).publish(7)
    assert not {"e0.commit 7", "e1.commit 7", "e0.resume", "e1.resume"} & set(calls)


WRONG = {
    "unknown name": ({"a": "float32:2,4", "c": "float32:3"}, "engine e1 has no tensor b"),
    "other shape": (TENSORS | {"a": "float32:4,2"}, "engine e1 holds a as float32:4,2, the trainer sends float32:2,4"),
    "other dtype": (TENSORS | {"c": "bfloat16:3"}, "engine e1 holds c as bfloat16:3, the trainer sends float32:3"),
    "never sent": (TENSORS | {"d": "float32:1"}, "engine e1 loads d, which the trainer does not have"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_tensors_that_the_engine_does_not_hold_so_are_refused_before_the_first_byte(case):
    inventory, text = WRONG[case]
    calls = Calls()
    publishing = publisher(calls, FakeReceiver("e0", calls), FakeReceiver("e1", calls, inventory))
    for _ in range(2):  # and again at the next publication: a refusal is not remembered as a check
        with pytest.raises(SlimxError, match=text):
            await publishing.publish(7)
        assert not [call for call in calls if "gather" in call or "stage" in call or "load" in call]


# Deadlines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hang", "stage"),
    [
        ("tensors", "check"),
        ("e1.inventory", "check"),
        ("e0.pause", "pause"),
        ("gather 1", "gather"),
        ("e1.stage 1", "stage"),
        ("e0.load", "load"),
        ("e1.verify", "verify"),
        ("e0.commit 7", "commit"),
        ("e1.resume", "commit"),
    ],
)
async def test_a_deadline_tells_the_stage_and_who_holds_it(hang, stage):
    calls = Calls()
    calls.hang = hang
    with pytest.raises(DeadlineError) as caught:
        await publisher(calls, deadline_s=0.1).publish(7)
    assert f"publication of version 7, stage {stage}; it is held by engines e0, e1" in str(caught.value)
    assert (caught.value.awaited, caught.value.seconds) == (f"publication of version 7, stage {stage}", 0.1)
    assert hang == "e1.resume" or not [call for call in calls if call.endswith("resume")]


async def test_an_engine_that_hangs_in_its_abort_too_cannot_hold_the_publication():
    calls = Calls()
    calls.hang = "e1.stage 0"

    class Gone(FakeReceiver):
        async def abort(self) -> None:
            await asyncio.sleep(600)

    async with asyncio.timeout(2):
        with pytest.raises(DeadlineError, match="stage stage; it is held by engines e0, e1"):
            await publisher(calls, FakeReceiver("e0", calls), Gone("e1", calls), deadline_s=0.1).publish(7)


# Buckets --------------------------------------------------------------------------------------------------------------

HF = {
    "hidden_size": 12,
    "head_dim": 6,
    "vocab_size": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 2,
}
TABLE = weight_table(HF)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [1, 500, 2000, 4096, 10**9])
def test_buckets_hold_every_tensor_once_in_order_aligned_and_within_their_size(itemsize, size):
    buckets = make_buckets(TABLE, itemsize, size)
    tensors = [tensor for bucket in buckets for tensor in bucket.tensors]
    assert [(t.name, t.shape) for t in tensors] == list(TABLE.checkpoint().items())
    for bucket in buckets:
        end = 0
        for tensor in bucket.tensors:
            assert tensor.offset % ALIGNMENT == 0 and end <= tensor.offset < end + ALIGNMENT
            assert tensor.nbytes == matrix(tensor.shape)[0] * matrix(tensor.shape)[1] * itemsize
            end = tensor.offset + tensor.nbytes
        assert bucket.size == end
        assert bucket.size <= size or len(bucket.tensors) == 1, "only a tensor larger than a bucket may exceed it"
    for bucket, after in zip(buckets, buckets[1:], strict=False):
        room = size - -(-bucket.size // ALIGNMENT) * ALIGNMENT
        assert after.tensors[0].nbytes > room, "a bucket ends only where the next tensor does not fit"


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(data=2),
        Sizes(data=2, expert=2),
        Sizes(tensor=2, expert_tensor=2),
        Sizes(pipeline=2),
        Sizes(tensor=2, pipeline=2, data=4, expert=2, expert_tensor=2),
        Sizes(tensor=2, data=2, expert=4),
    ],
)
def test_the_ranks_contributions_cover_every_byte_of_every_bucket_once(sizes):
    buckets = make_buckets(TABLE, 4, 3000)
    contributions = Contributions(TABLE, sizes, buckets, 4)
    assert len(contributions.parts) == len(contributions.nbytes) == sizes.world and len(buckets) > 3
    for number, bucket in enumerate(buckets):
        covered = [np.zeros(matrix(tensor.shape), int) for tensor in bucket.tensors]
        for rank in range(sizes.world):
            end = 0
            for part in contributions.parts[rank][number]:
                assert part.at == end, "a rank's parts follow each other without a gap"
                rect = part.rect
                covered[part.tensor][rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols] += 1
                end += rect.rows * rect.cols * 4
            assert end == contributions.nbytes[rank][number]
        assert all((count == 1).all() for count in covered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_bucket_holds_the_checkpoints_bytes_and_their_checksums(dtype):
    """One rank; several ranks gather in tests/integration/test_trainer_layouts.py."""
    generator = torch.Generator().manual_seed(1)
    whole = {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in TABLE.checkpoint().items()}
    parameters: dict[str, torch.Tensor] = {}
    for held in TABLE.held_by(coordinates(0, Sizes()), Sizes()):
        local = torch.empty(held.shape, dtype=dtype)
        for r in held.rects:
            source = whole[held.sources[r.source][0]]
            source = source.view(matrix(source.shape))[r.row : r.row + r.rows, r.col : r.col + r.cols]
            local[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = source
        parameters[held.name] = local[:, 0] if len(held.sources[0][1]) == 1 else local
    group: Any = None
    gatherer = Gatherer(TABLE, Sizes(), 0, parameters, dtype=dtype, bucket_bytes=2000, group=group)
    found = {}
    for number in range(len(gatherer.buckets)):
        packed = gatherer.gather(number)
        memory = torch.from_numpy(np.fromfile(packed.path, np.uint8))
        assert len(memory) == packed.size
        sent = {t.name: f"{t.dtype}:{','.join(map(str, t.shape))}" for t in packed.tensors}
        assert gatherer.forms()[number] == sent, "what is announced to the engines must be what is sent"
        for t in packed.tensors:
            found[t.name] = memory[t.offset : t.offset + t.nbytes].view(dtype).view(t.shape)
            assert t.checksum == reference.checksum(found[t.name]) and t.dtype == str(dtype).removeprefix("torch.")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    path = packed.path
    gatherer.release()
    assert not Path(path).exists()
