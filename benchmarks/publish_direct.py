"""Compares a publication from every trainer rank to every engine rank, over links of a known rate, with a simple one.

    sudo python benchmarks/publish_direct.py [--mbit 400] [--rounds 3] [--layers 4] [--hosts 1x1 2x2 2x4] [--colocate]

Network namespaces are the machines, with two ranks each and one link of `--mbit` Mbit/s (`tc ... tbf`) that the two
share. Trainer hosts hold a small Qwen3-MoE (data parallel, experts on two ranks); each engine host is an engine of two
ranks with SGLang's fused parameters. *direct* is slimx's own publisher, dealing, senders and receivers (NIXL over tcp),
with every tensor verified in staging and in the engine. *Per tensor* is a trainer without a plan
(`publish_tensors.py`): one gather and one broadcast for each tensor.

    link limit     bytes of the busiest link, as they were dealt out, over its rate
    of limit       seconds of the buckets over that (goal: 1.15)
    busiest        bytes of the busiest link over the average of its side
    predicted      seconds of the buckets by the model of `slimx plan --predict`, from the links' rate, this machine's
                   rates of packing and checking, and an empty call to the hosts; `off`: by how much it misses

`--colocate` publishes as trainers and engines on shared GPUs do, in host memory: each bucket is loaded before the next
one is checked, and engines start at different buckets.

Exits with status 1 if a prediction is off by more than 15%. Needs root and iproute2; without them it prints why it is
skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from publish_hosts import Host, Resident, hosts, unavailable  # noqa: E402
from publish_parties import Engine, Members, Trainers  # noqa: E402
from publish_tensors import Meeting as Tensors  # noqa: E402
from publish_tensors import group_at, send, sizes_of, take  # noqa: E402
from quantities import positive, positive_float

from slimx.extras.direct.delivery import DirectDelivery  # noqa: E402
from slimx.extras.direct.ends.offer import Offer  # noqa: E402
from slimx.extras.direct.ends.receiver import DirectReceiver, Invitation  # noqa: E402
from slimx.extras.direct.ends.sender import DirectSender  # noqa: E402
from slimx.extras.direct.ends.sent_bucket import SentBucket  # noqa: E402
from slimx.extras.direct.source import DirectSource  # noqa: E402
from slimx.extras.direct.wire import wire_bytes  # noqa: E402
from slimx.extras.planner.links.model import STEPS, direct_traffic, predict  # noqa: E402
from slimx.extras.planner.links.rehearsal import (  # noqa: E402
    MODEL,
    SMALL,
    EngineRank,
    Rehearsal,
    calibrate,
    one_thread,
)
from slimx.layout.engine import EngineLayout  # noqa: E402
from slimx.layout.megatron import MegatronLayout  # noqa: E402
from slimx.layout.number_formats import Precision  # noqa: E402
from slimx.layout.ranks import EngineSizes, Sizes  # noqa: E402
from slimx.models.families.qwen3_moe import engine_table, weight_table  # noqa: E402
from slimx.reshard.manifest import Publication  # noqa: E402
from slimx.reshard.pack.packer import Packer  # noqa: E402
from slimx.reshard.pack.pieces import PlannedBuckets  # noqa: E402
from slimx.reshard.packed import PackedBucket  # noqa: E402
from slimx.reshard.plan.copy_plan import Plan, compile_plan  # noqa: E402
from slimx.reshard.publish import Publisher  # noqa: E402

MIB, RANKS, DEADLINE_S = 2**20, 2, 240
CLOSE = 0.15
"""Largest accepted relative error of a prediction. The program exits with status 1 if it is larger."""
EXPERT = 2
"""Number of trainer ranks that together have all experts: those of one host."""
ENGINE = EngineSizes(tensor=RANKS, expert=RANKS)


def trainer_sizes(count: int) -> Sizes:
    """Returns the sizes of `count` hosts with two ranks each: every rank has the dense layers, every second one the
    same experts."""
    return Sizes(data=RANKS * count, expert=EXPERT)


def plan_of(layers: int, trainers: int) -> Plan:
    hf = {**MODEL, "num_hidden_layers": layers}
    return compile_plan(
        MegatronLayout(weight_table(hf), trainer_sizes(trainers)).parts(),
        EngineLayout(engine_table(hf), ENGINE).parts(),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=16 * MIB,
        ranks=RANKS,
    )


# Processes on the hosts ---------------------------------------------------------------------------------------------


class TrainerRank:
    def __init__(self, rank: int, layers: int, trainers: int, address: str):
        torch.set_num_threads(1)
        self.rank, self.address = rank, address
        layout = MegatronLayout(weight_table({**MODEL, "num_hidden_layers": layers}), trainer_sizes(trainers))
        # Every rank with a part has the same values.
        self.parameters = {}
        for number, part in enumerate(layout.parts()):
            if rank in part.ranks and not part.copy:
                draw = torch.Generator().manual_seed(number)
                self.parameters[part.name] = torch.randn(part.shape, generator=draw).to(torch.bfloat16)

    def prepare(self, plan: bytes, edges: list[int], item: int) -> None:
        packer = Packer(Plan.from_bytes(plan), self.rank, self.parameters)
        self.sender = DirectSender(packer, f"trainer rank {self.rank}", self.address, edges=edges, item=item)

    def connect(self, engine: int, offer: bytes) -> None:
        self.sender.connect(engine, Offer.from_bytes(offer))

    def answer(self) -> None:
        """Returns nothing: measures the time of a call."""

    def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> SentBucket:
        return self.sender.send(bucket, transfer, engines)

    # Tensor by tensor.

    def gather_at(self) -> tuple[tuple[str, int], list[int]]:
        """Opens a rendezvous; returns its address and the bytes of every tensor to be broadcast."""
        self.tensors = Tensors(self.address)
        return self.tensors.where, sizes_of(self.parameters, EXPERT)

    def gather(self, where: tuple[str, int], engines: int) -> float:
        """Sends all tensors to every engine; returns the seconds."""
        holders = group_at(where, "trainers", self.rank, EXPERT, self.address)
        sending = group_at(where, "engines", 0, 1 + engines, self.address) if self.rank == 0 else None
        return send(self.parameters, self.rank, holders, sending)


class EngineHost:
    def __init__(self, address: str):
        torch.set_num_threads(1)
        self.address = address

    def join(self, invitation: Invitation) -> Offer:
        self.receiver = DirectReceiver(invitation, self.address)
        parts = [Plan.from_bytes(part) for part in invitation.parts]
        self.forms = [PlannedBuckets(part).forms()[0] for part in parts]
        self.ranks = []
        for part in parts:
            tensors = [tensor for bucket in part.buckets[0] for tensor in bucket.tensors]
            self.ranks.append(EngineRank({t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for t in tensors}))
        return self.receiver.offer()

    def receive(self, packed: PackedBucket) -> None:
        with self.receiver.landed(packed) as landed:
            paths = (landed.path, *landed.others)
            for rank, path, tensors in zip(self.ranks, paths, landed.targets, strict=True):
                rank.stage(path, landed.size, tensors)

    def load(self) -> None:
        for rank in self.ranks:
            rank.load()

    def verify(self) -> int:
        return sum(rank.verify() for rank in self.ranks)

    def drop(self) -> None:
        for rank in self.ranks:
            rank.drop()

    def take_tensors(self, where: tuple[str, int], sizes: list[int], rank: int, size: int) -> None:
        take(sizes, group_at(where, "engines", rank, size, self.address))


class Stand:
    """Trainer hosts and engine hosts with all processes of a publication."""

    def __init__(
        self,
        stack: ExitStack,
        trainers: int,
        engines: int,
        *,
        mbit: float,
        layers: int,
        step_deadline_s: float = DEADLINE_S,
        colocate: bool = False,
    ):
        names = [f"t{k}" for k in range(trainers)] + [f"e{k}" for k in range(engines)]
        self.hosts: list[Host] = stack.enter_context(hosts(names, mbit))
        self.plan = plan_of(layers, trainers)
        homes = self.hosts[:trainers]
        # The two ranks of a host send through one link.
        self.ranks = [
            Resident(home, TrainerRank, RANKS * number + inner, layers, trainers, home.address)
            for number, home in enumerate(homes)
            for inner in range(RANKS)
        ]
        self.residents = [Resident(host, EngineHost, host.address) for host in self.hosts[trainers:]]
        for process in (*self.ranks, *self.residents):
            stack.callback(process.stop)
        self.engines = [Engine(number, resident, self.plan) for number, resident in enumerate(self.residents)]
        self.members = Members(self.engines)
        self.delivery = DirectDelivery(
            Trainers(self.ranks, self.plan),
            dict.fromkeys((engine.name for engine in self.engines), [None]),
            step_deadline_s=step_deadline_s,
            staggered=colocate,
        )
        self.colocate = colocate
        self.publisher = Publisher(
            DirectSource(self.delivery),
            self.members,
            self.delivery,
            deadline_s=2 * DEADLINE_S,
            step_deadline_s=step_deadline_s,
            encoding="local",
            staging="bucket" if colocate else "model",
        )

    async def publish(self, version: int) -> Publication:
        return await self.publisher.publish(version, trainer_step=version)

    def per_tensor(self) -> float:
        """Sends all tensors from trainer rank 0's host to every engine, one after the other; returns the seconds."""
        where, sizes = self.ranks[0].ask("gather_at")
        count = len(self.residents)
        with ThreadPoolExecutor(count + EXPERT) as pool:
            taking = [
                pool.submit(resident.ask, "take_tensors", where, sizes, number, count + 1)
                for number, resident in enumerate(self.residents, 1)
            ]
            sending = [pool.submit(rank.ask, "gather", where, count) for rank in self.ranks[:EXPERT]]
            for one in taking:
                one.result()
            return sending[0].result()


def predicted(stand: Stand, rate: float) -> float:
    """Returns the seconds that the link model predicts for the buckets, on links of `rate` bytes per second."""
    with one_thread():
        small = Rehearsal.of(SMALL)
        calibrate(small)  # first touches
        here = calibrate(small)
    began = time.perf_counter()
    asyncio.run(stand.delivery.senders._all("answer", [()] * len(stand.ranks)))
    control = time.perf_counter() - began
    links = replace(here, link=rate / RANKS, control=control, cores=None)
    traffic = direct_traffic(stand.delivery.dealt, sources=len(stand.ranks))
    stages = predict(traffic, links, by_bucket=stand.colocate, copies=int(stand.colocate))
    load = 0 if stand.colocate else stages.load  # with buckets loaded one by one, part of their time
    return stages.total - load - stages.verify - STEPS * control


def measure(
    trainers: int, engines: int, *, mbit: float, layers: int, rounds: int, colocate: bool
) -> tuple[float, float]:
    """Prints the row of one number of hosts; returns the median seconds of the buckets, and the relative error of the
    model."""
    rate = mbit * 1e6 / 8
    with ExitStack() as stack:
        stand = Stand(stack, trainers, engines, mbit=mbit, layers=layers, colocate=colocate)
        dealt = stand.delivery.dealt
        wire = wire_bytes(dealt)
        sent = wire.sent(len(stand.ranks)).reshape(trainers, RANKS).sum(axis=1)
        received = wire.received(dealt.targets).reshape(engines, RANKS).sum(axis=1)
        busiest = max(sent.max(), received.max())
        asyncio.run(stand.publish(0))  # connections, and first touches of memory
        before = [host.carried() for host in stand.hosts]
        done = [asyncio.run(stand.publish(version)) for version in range(1, rounds + 1)]
        after = [host.carried() for host in stand.hosts]
        assert not any(one.lost for one in done), [o.error for one in done for o in one.engines.values()]
        staged = median(one.seconds["stage"] + (one.seconds["load"] if colocate else 0) for one in done)
        total = median(one.seconds["total"] for one in done)
        expected_s = predicted(stand, rate)
        plain = median(stand.per_tensor() for _ in range(rounds))
        print(
            f"{trainers} x {engines}{busiest / MIB:>11.1f}{busiest / rate:>12.2f}{staged:>10.2f}{total:>8.2f}"
            f"{staged / (busiest / rate):>10.2f}{sent.max() / sent.mean():>9.3f}"
            f"{received.max() / received.mean():>9.3f}"
            f"{plain:>14.2f}{plain / staged:>8.2f}"
            f"{expected_s:>11.2f}{expected_s / staged - 1:>+7.0%}"
        )
        for k, (host, (sent0, got0), (sent1, got1)) in enumerate(zip(stand.hosts, before, after, strict=True)):
            dealt_bytes = (sent[k], 0) if k < trainers else (0, received[k - trainers])
            print(
                f"      {'trainer' if k < trainers else 'engine'} host {host.address}: sent "
                f"{(sent1 - sent0) / rounds / MIB:.1f} MiB a publication (dealt {dealt_bytes[0] / MIB:.1f}), received "
                f"{(got1 - got0) / rounds / MIB:.1f} (dealt {dealt_bytes[1] / MIB:.1f})"
            )
    return staged, expected_s / staged - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=positive_float, default=400)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hosts", nargs="+", default=["1x1", "2x2", "2x4"])
    parser.add_argument("--colocate", action="store_true", help="load each bucket at once; stagger engines")
    options = parser.parse_args()
    if (why := unavailable()) is not None:
        print(f"skipped: {why}")
        return
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # hosts and their processes end with it
    print(
        "hosts  busiest MiB  limit s  buckets s  all s  of limit  busiest send/receive"
        "  per tensor s   ratio  predicted    off"
    )
    done = {}
    for case in options.hosts:
        trainers, engines = map(int, case.split("x"))
        done[case] = measure(
            trainers,
            engines,
            mbit=options.mbit,
            layers=options.layers,
            rounds=options.rounds,
            colocate=options.colocate,
        )
    if {"1x1", "2x2"} <= done.keys():
        ratio = done["2x2"][0] / done["1x1"][0]
        print(f"\nhosts doubled on both sides, 2x2 / 1x1: {ratio:.2f} (goal: 0.9 to 1.1)")
    worst = max((off for _, off in done.values()), key=abs)
    print(f"predictions miss by {worst:+.0%} at most (goal: {CLOSE:.0%})")
    sys.exit(abs(worst) > CLOSE)


if __name__ == "__main__":
    main()
