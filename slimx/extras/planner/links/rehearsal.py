"""A rehearsal: a publication within this process that serves to measure the rates of this machine, and to test whether
the link model predicts the publication's duration from these rates.

The trainer side is slimx's own code (`Gatherer`, `Publisher`). The engine side is `EngineRank`, which loads and checks
its parameters as the receiver in an engine's process does. Weights are random, because only their size matters."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from timeit import timeit

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.extras.planner.links.model import Links, LinkTrial, Traffic, predict, traffic_of
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Table
from slimx.models.families.qwen3_moe import engine_table, weight_table
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.pack.gather import Gatherer
from slimx.reshard.pack.packer import Packer, describe
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.parties import LocalRecipient, Recipient, Staging
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from slimx.reshard.publish import Publisher
from slimx.reshard.transports.memory import open_memory

MIB = 2**20
MODEL = {
    "hidden_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "moe_intermediate_size": 256,
    "vocab_size": 1024,
}
"""config.json of a small Qwen3-MoE model with 30 MiB of bf16 weights per layer."""
SMALL, LARGE = 1, 5
"""Number of layers of two models: rates are measured with the first; the publication of the second is predicted and
then measured."""
ROUNDS, FEWEST, LIMIT_S = 5, 3, 2.0
"""Maximum and minimum number of rounds of a rehearsal, and the seconds after which no further round starts."""
DEADLINE_S = 30.0


class EngineRank:
    """Parameters of one engine rank, and the received tensors that are staged for them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        """Stores `parameters`: contiguous tensors by published name."""
        self.parameters = parameters
        self._staged: dict[str, torch.Tensor] = {}
        self._checksums: dict[str, int] = {}

    def stage(self, path: str, size: int, tensors: Sequence[PackedTensor]) -> float:
        """Maps the bucket of `size` bytes in the shared memory at `path`, and verifies the checksums of its `tensors`.
        Returns the duration of the verification in seconds."""
        memory = open_memory(path, size)
        began = time.perf_counter()
        views: dict[str, torch.Tensor] = {}
        checksums: dict[str, int] = {}
        for tensor in tensors:
            views[tensor.name] = memory[tensor.offset : tensor.offset + tensor.nbytes]
            checksums[tensor.name] = tensor.checksum
        self._verify(views, checksums, "staged")
        for tensor in tensors:
            self._staged[tensor.name] = views[tensor.name].view(self.parameters[tensor.name].dtype)
        self._checksums |= checksums
        return time.perf_counter() - began

    def load(self) -> None:
        """Copies the staged tensors into the parameters."""
        for name, values in self._staged.items():
            parameter = self.parameters[name]
            parameter.copy_(values.view(parameter.shape))
        self._staged.clear()

    def verify(self) -> int:
        """Returns the number of loaded tensors after verifying that they match the published checksums. Raises
        SlimxError if a tensor does not match."""
        self._verify({name: self.parameters[name] for name in self._checksums}, self._checksums, "loaded")
        return len(self._checksums)

    def drop(self) -> None:
        """Discards the staged tensors without loading them."""
        self._staged.clear()

    @staticmethod
    def _verify(views: Mapping[str, torch.Tensor], checksums: Mapping[str, int], state: str) -> None:
        pieces = []
        for index, view in enumerate(views.values()):
            pieces.append(kernel.rectangle(view.view(-1), tensor=index, pos=0, pos_ld=view.nbytes))
        sums = kernel.seeds([view.nbytes for view in views.values()])
        kernel.checksum_rects(np.array(pieces, dtype=kernel.PIECE), sums)
        for name, checksum in zip(views, sums.tolist(), strict=True):
            if checksum != checksums[name]:
                raise SlimxError(
                    f"the {state} tensor {name} has the checksum {checksum:016x} instead of the published "
                    f"{checksums[name]:016x}, so bytes changed in transit; check the network for errors, and repeat "
                    "the rehearsal",
                    code="links.checksum",
                    about=name,
                )


class Rehearsal:
    """One trainer rank and one engine rank, each on its own thread, so that each has a core to itself on a machine with
    two cores."""

    def __init__(self, trained: Table, served: Table):
        """Plans the publication of a model. `trained`, `served`: its weight tables in trainers and in engines."""
        self.plan: Plan = compile_plan(
            MegatronLayout(trained, Sizes()).parts(),
            EngineLayout(served, EngineSizes()).parts(),
            precision=Precision("bfloat16", "bfloat16"),
            bucket_bytes=32 * MIB,
        )
        weights: dict[str, torch.Tensor] = {}
        for parameter in self.plan.parameters:
            if parameter.name not in weights:
                weights[parameter.name] = _random(parameter.shape)
        packer = Packer(self.plan, 0, weights)
        self.gatherer = Gatherer(packer, remote=(), group=None)
        parameters: dict[str, torch.Tensor] = {}
        for bucket in self.plan.buckets[0]:
            for tensor in bucket.tensors:
                parameters[tensor.name] = torch.zeros(tensor.shape, dtype=torch.bfloat16)
        self.engine = EngineRank(parameters)

    @staticmethod
    def of(layers: int) -> Rehearsal:
        """Returns the rehearsal of `MODEL` with this number of layers."""
        hf = {**MODEL, "num_hidden_layers": layers}
        return Rehearsal(weight_table(hf), engine_table(hf))

    @property
    def traffic(self) -> Traffic:
        return traffic_of(self.plan, sources=1, engines=1, engine_ranks=1, encoding="local")

    def pack(self, bucket: int) -> PackedBucket:
        path = self.gatherer.open(bucket)[0]
        return describe(self.gatherer.packer.form(bucket), [path], [self.gatherer.fill(bucket, [path])])

    def stage(self, packed: PackedBucket) -> float:
        return self.engine.stage(packed.path, packed.size, packed.targets[0])

    async def publish(self) -> float:
        """Runs one publication with slimx's publisher and returns its duration in seconds."""
        publisher = Publisher(
            self, OnlyOne(_Engine(self)), deadline_s=DEADLINE_S, step_deadline_s=DEADLINE_S, encoding="local"
        )
        return (await publisher.publish(0, trainer_step=0)).seconds["total"]

    # The methods of `slimx.reshard.parties.Source`, the sender of a publication.

    async def begin(self, manifest: Manifest) -> None: ...

    async def forms(self) -> list[dict[str, str]]:
        return PlannedBuckets(self.plan).forms()

    async def bucket_count(self) -> int:
        return self.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        return await asyncio.to_thread(self.pack, bucket)

    async def release(self, bucket: int | None = None) -> None:
        self.gatherer.release(bucket)


def rehearse() -> LinkTrial:
    """Compares the link model with this machine: repeatedly measures rates on a small model, predicts the publication
    of a larger one from them, and publishes it. Takes about two seconds, on two threads."""
    predicted: list[float] = []
    measured: list[float] = []
    with one_thread():
        small = Rehearsal.of(SMALL)
        large = Rehearsal.of(LARGE)
        traffic = large.traffic
        calibrate(small)  # first access to all memory, which is slower
        asyncio.run(large.publish())
        began = time.monotonic()
        while len(measured) < FEWEST or (len(measured) < ROUNDS and time.monotonic() - began < LIMIT_S):
            predicted.append(predict(traffic, calibrate(small)).total)
            measured.append(asyncio.run(large.publish()))
    return LinkTrial(predicted, measured)


def calibrate(rehearsal: Rehearsal) -> Links:
    """Returns this machine's rates, measured in one pass of every stage over the small model of `rehearsal`, with
    nothing else running."""
    plan = rehearsal.plan
    engine = rehearsal.engine
    size = 0
    for part in plan.buckets[0]:
        size += sum(tensor.nbytes for tensor in part.tensors)
    call = _latency()
    pack = 0.0
    check = 0.0
    for bucket in range(plan.count):
        seconds, packed = _timed(partial(rehearsal.pack, bucket))
        pack += seconds - call
        seconds, _ = _timed(partial(rehearsal.stage, packed))
        check += seconds - call
    tensors = len(engine.parameters)
    load, _ = _timed(engine.load)
    verify, _ = _timed(engine.verify)
    verify -= call
    rehearsal.gatherer.release()
    cores = len(os.sched_getaffinity(0))
    return Links(
        name=f"this machine, {cores} cores",
        pack=size / pack,
        link=None,
        check=size / check,
        copy=size / max(load - tensors * call, load / 2),
        verify=size / verify,
        call=call,
        message=0.0,
        control=_hop(),
        cores=cores,
    )


def _timed[Result](work: Callable[[], Result]) -> tuple[float, Result]:
    """Calls `work` and returns its duration in seconds and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _latency() -> float:
    """Measures the duration in seconds of a kernel call on a few bytes."""
    source = torch.zeros(8, dtype=torch.uint8)
    target = torch.zeros(8, dtype=torch.uint8)
    pieces = np.array([kernel.rectangle(source, tensor=0, pos=0, pos_ld=8)], dtype=kernel.PIECE)
    sums = np.zeros(1, np.uint64)
    return timeit(lambda: kernel.pack(pieces, target, sums), number=50) / 50


def _hop() -> float:
    """Measures the duration in seconds of an empty call to another thread."""
    with ThreadPoolExecutor(1) as pool:
        return timeit(lambda: pool.submit(int).result(), number=20) / 20


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits this process's kernels and memory copies to one thread each within the block, as the link model
    assumes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)


# Engines of the publisher ------------------------------------------------------------------------------------------


class _Engine(LocalRecipient):
    name = "rehearsal"

    def __init__(self, rehearsal: Rehearsal):
        self.rehearsal = rehearsal

    async def inventory(self, encoding: Encoding) -> list[dict[str, str]]:
        return await self.rehearsal.forms()

    async def begin(self, manifest: Manifest, staging: Staging) -> None: ...

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        await asyncio.to_thread(self.rehearsal.stage, packed)

    async def abort(self) -> None:
        self.rehearsal.engine.drop()

    async def pause(self) -> None: ...

    async def load(self) -> None:
        await asyncio.to_thread(self.rehearsal.engine.load)

    async def verify(self) -> dict[str, int]:
        return {"checked": await asyncio.to_thread(self.rehearsal.engine.verify)}

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...


class OnlyOne:
    """Stand-in for the engines of a publication: a single engine, whose failure ends the publication."""

    epoch = 0

    def __init__(self, engine: Recipient):
        self.engine = engine

    def candidates(self) -> Sequence[Recipient]:
        return [self.engine]

    async def quarantine(self, recipient: Recipient, error: SlimxError) -> None:
        raise error

    async def admit(self, recipient: Recipient) -> None: ...
