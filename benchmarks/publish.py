"""Compares a publication, stage by stage, with one gather, conversion and broadcast per tensor.

    python benchmarks/publish.py [--split tensor|expert] [--rounds 5] [--json FILE]

Real processes on this machine: two trainer ranks that share one Qwen3-30B-A3B-like layer (1.31 GB of bf16), tensor
parallel or expert parallel, and one engine rank with SGLang's fused parameters. One thread each. Every round runs all
methods, in rotating order, so that other work on the machine affects all of them:

    slimx local   slimx's publisher, packer and gatherer; buckets contain the engine's fused tensors
    slimx hf      the same with Hugging Face names
    per tensor    gloo all-gather of each parameter, torch views, split and cat, one gloo broadcast per tensor

The engine has one set of parameters for slimx and one for the per-tensor method. A set is overwritten before its
method runs, and afterwards both must be equal bit for bit. slimx verifies every tensor twice, in staging and in the
engine; the per-tensor method never does.

At the end, publications on clusters as the link model predicts them, if the model predicts this machine's own
publication within 25%: that of `slimx plan --predict`, and the one measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from machine import cpu_seconds, surroundings
from peer import DEADLINE_S, Peer
from publish_clusters import CASES, predicted
from publish_figures import PER_TENSOR, PublishFigures, describe, describe_model, describe_predictions
from publish_model import MODEL, TRAINERS, Layer
from publish_ranks import ENCODINGS, EngineProcess, TrainerProcess
from quantities import positive

from slimx.errors import SlimxError
from slimx.extras.planner.links.model import LinkTrial, predict, traffic_of
from slimx.extras.planner.links.rehearsal import SMALL, OnlyOne, Rehearsal, calibrate, one_thread, rehearse
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.pack.packer import describe as describe_bucket
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import LocalRecipient, Staging
from slimx.reshard.publish import Publisher
from slimx.runtime.ports import free_port

MIB = 2**20


class Trainers:
    """Both trainer processes, as the publisher's source."""

    def __init__(self, peers: Sequence[Peer], planned: PlannedBuckets, encoding: Encoding):
        self.peers, self.planned, self.encoding = peers, planned, encoding

    async def begin(self, manifest: Manifest) -> None: ...

    async def forms(self) -> list[dict[str, str]]:
        return self.planned.forms()

    async def bucket_count(self) -> int:
        return self.planned.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        path = await asyncio.to_thread(self.peers[0].call, "open", self.encoding, bucket)
        calls = (asyncio.to_thread(peer.call, "fill", self.encoding, bucket, path) for peer in self.peers)
        return describe_bucket(self.planned.form(bucket), [path], await asyncio.gather(*calls))

    async def release(self, bucket: int | None = None) -> None:
        await asyncio.to_thread(self.peers[0].call, "release", self.encoding, bucket)


class Engine(LocalRecipient):
    """The engine process as a receiver."""

    name = "engine"

    def __init__(self, peer: Peer, planned: PlannedBuckets, encoding: Encoding):
        self.peer, self.planned, self.encoding = peer, planned, encoding
        self.mapped = self.proven = 0.0
        """Seconds for mapping and for verifying in the last publication's staging."""

    async def inventory(self, encoding: Encoding) -> list[dict[str, str]]:
        return self.planned.forms()

    async def begin(self, manifest: Manifest, staging: Staging) -> None:
        self.mapped = self.proven = 0.0

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        (tensors,) = packed.targets
        mapped, proven = await self._call("stage", packed.path, packed.size, tensors)
        self.mapped, self.proven = self.mapped + mapped, self.proven + proven

    async def abort(self) -> None:
        await self._call("drop")

    async def pause(self) -> None: ...

    async def load(self) -> None:
        await self._call("load")

    async def verify(self) -> dict[str, int]:
        return {"checked": await self._call("verify")}

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def _call(self, method: str, *arguments: object) -> object:
        return await asyncio.to_thread(self.peer.call, method, self.encoding, *arguments)


class Methods:
    """All methods of publishing, on the same processes."""

    def __init__(self, trainers: Sequence[Peer], engine: Peer, layer: Layer, bucket_bytes: int):
        self.trainers, self.engine, self.layer = trainers, engine, layer
        self.plans = {encoding: layer.plan(encoding, bucket_bytes) for encoding in ENCODINGS}
        planned = {encoding: PlannedBuckets(plan) for encoding, plan in self.plans.items()}
        self.receivers = {e: Engine(engine, planned[e], e) for e in ENCODINGS}
        self.publishers = {
            e: Publisher(
                Trainers(trainers, planned[e], e),
                OnlyOne(self.receivers[e]),
                deadline_s=DEADLINE_S,
                step_deadline_s=DEADLINE_S,
                encoding=e,
            )
            for e in ENCODINGS
        }

    async def slimx(self, encoding: Encoding, version: int) -> dict[str, float]:
        """Publishes once by slimx; returns seconds by stage."""
        seconds = (await self.publishers[encoding].publish(version, trainer_step=version)).seconds
        receiver = self.receivers[encoding]
        return {
            "pack": seconds["gather"],
            "transfer": receiver.mapped,
            "verify": receiver.proven + seconds["verify"],
            "load": seconds["load"],
            "total": seconds["total"],
        }

    async def per_tensor(self) -> dict[str, float]:
        """Publishes once tensor by tensor; returns seconds by stage."""
        began = time.perf_counter()
        peers = (*self.trainers, self.engine)
        answers = await asyncio.gather(*(asyncio.to_thread(peer.call, "per_tensor") for peer in peers))
        return {**answers[0], "verify": 0.0, **answers[-1], "total": time.perf_counter() - began}


async def measure(methods: Methods, rounds: int) -> PublishFigures:
    """Measures all methods alternately; the first round is not counted."""
    figures = PublishFigures(tensors=len(methods.layer.table.checkpoint_shapes()))
    names = [*(f"slimx {encoding}" for encoding in ENCODINGS), PER_TENSOR]
    figures.rounds = {name: [] for name in names}
    figures.buckets = {f"slimx {encoding}": plan.count for encoding, plan in methods.plans.items()}
    figures.nbytes = sum(bucket.size for bucket in methods.plans["hf"].buckets[0])
    small = Rehearsal.of(SMALL)
    calibrate(small)
    before = cpu_seconds(), time.perf_counter()
    for number in range(rounds + 1):
        seconds, links = {}, calibrate(small)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            await asyncio.to_thread(methods.engine.call, "wipe", name != PER_TENSOR)
            if name == PER_TENSOR:
                seconds[name] = await methods.per_tensor()
            else:
                seconds[name] = await methods.slimx(name.removeprefix("slimx "), number)
            if number or len(seconds) == len(names):  # both sides hold something
                await asyncio.to_thread(methods.engine.call, "compare")
        if number:
            for name in names:
                figures.rounds[name].append(seconds[name])
            figures.links.append(links)
    figures.others = (cpu_seconds() - before[0]) / (time.perf_counter() - before[1])
    return figures


def local_trial(methods: Methods, figures: PublishFigures) -> LinkTrial:
    """Compares the link model, with the rates of small pieces from each round, with the round's publication."""
    traffic = traffic_of(methods.plans["local"], sources=TRAINERS, engines=1, engine_ranks=1, encoding="local")
    measured = figures.seconds("slimx local", "total").tolist()
    return LinkTrial([predict(traffic, links).total for links in figures.links], measured)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="slimx's publication, compared with one gather and broadcast per tensor"
    )
    parser.add_argument(
        "--split", choices=("tensor", "expert"), default="tensor", help="parallelism of the two trainers"
    )
    parser.add_argument("--experts", type=positive, default=MODEL["num_experts"], help="experts of the layer")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of every method; one more is not counted")
    parser.add_argument("--bucket-mib", type=positive, default=256, help="size of a bucket")
    parser.add_argument("--cases", type=positive, default=len(CASES), help="clusters predicted, the first of them")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error(f"--rounds is {arguments.rounds}: a median and its spread need 3 at least")
    where, layer = surroundings("slimx", "torch"), Layer(arguments.split, arguments.experts)
    bucket_bytes = arguments.bucket_mib * MIB
    init_method = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    trainers = [Peer(TrainerProcess, rank, init_method, layer, bucket_bytes) for rank in range(TRAINERS)]
    engine = Peer(EngineProcess, TRAINERS, init_method, layer)
    try:
        for peer in (*trainers, engine):
            peer.ready()
        methods = Methods(trainers, engine, layer, bucket_bytes)
        with one_thread():
            figures = asyncio.run(measure(methods, arguments.rounds))
    finally:
        for peer in (*trainers, engine):
            peer.stop()
    local, rehearsed = local_trial(methods, figures), rehearse()
    rows = predicted(CASES[: arguments.cases]) if local.holds and rehearsed.holds else None
    print(describe(figures))
    print(
        f"two trainers, {layer.split} parallel; {layer.experts} experts, {figures.tensors} Hugging Face tensors; "
        f"{arguments.bucket_mib} MiB a bucket"
    )
    print(f"other processes used {figures.others:.2f} cores meanwhile; {where}\n")
    print(describe_model(figures, local, rehearsed))
    print(describe_predictions(rows))
    if arguments.json:
        values = {"where": where, **asdict(figures), "local": asdict(local), "rehearsed": asdict(rehearsed)}
        arguments.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/publish.py: {error}")
