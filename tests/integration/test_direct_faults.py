"""Publications from every trainer rank to real engines, struck at random moments: what serves is one version, whole.

A publication is struck at a seeded moment: one process of it is killed, or stopped permanently. Digests that SGLang
itself computes of each engine's weights are compared with those of the expected weights, which plain torch operations
make of the checkpoint (`tests.unit.layout.engine_stand`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.handle import EngineHandle, MemberState
from slimx.engines.server.http_calls import ControlClient
from slimx.errors import SlimxError
from slimx.extras.direct.delivery import DirectDelivery
from slimx.extras.direct.source import DirectSource
from slimx.layout.ranks import EngineSizes
from slimx.models.families.qwen3_moe import engine_table, weight_table
from slimx.reshard.manifest import Publication
from slimx.reshard.publish import Publisher, Staging
from tests.integration.conftest import Weights, perturbed
from tests.integration.direct_trainers import DirectTrainers, config_in, plan_for
from tests.integration.two_engines import two_engines
from tests.integration.victims import command_of
from tests.unit.layout.engine_stand import Served, engine_rank
from tests.unit.layout.layout_stand import Model

pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")
pytestmark = [pytest.mark.integration, pytest.mark.slow("random strikes at two engines"), pytest.mark.timeout(7200)]

ENGINE = EngineSizes()
STEP_S = 60.0
"""Deadline of a step: on busy cores one takes seconds."""
BACK_S = 900.0
BUCKET_BYTES = 2**17
KINDS = ("sender", "receiver", "scheduler", "server")
KILLS, STOPS = 20, 4


@dataclass(frozen=True)
class Moment:
    """A strike: its signal, its victim and its time."""

    kind: str
    number: int
    """The number of the rank, or of the engine."""
    signum: signal.Signals
    staging: Staging
    share: float
    """Share of the calls to engines that have begun by then."""
    later: float
    """And of the time of such a call that has gone by since."""


def moments(seed: int) -> list[Moment]:
    """Returns `KILLS` and `STOPS` in a random order; every kind of process is struck as often as any other."""
    draw = np.random.default_rng(seed)
    signals = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * STOPS
    kinds = [KINDS[n % len(KINDS)] for n in range(KILLS)] + [KINDS[n % len(KINDS)] for n in range(STOPS)]
    made = [
        Moment(kind, int(draw.integers(2)), signum, draw.choice(["bucket", "model"]), draw.random(), draw.random())
        for kind, signum in zip(kinds, signals, strict=True)
    ]
    return [made[number] for number in draw.permutation(len(made))]


class Stand:
    """Two real engines, and two trainer ranks that write to them."""

    def __init__(self, group: EngineGroup, trainers: DirectTrainers, weights: Weights):
        self.group, self.trainers, self.weights = group, trainers, weights
        receivers = {engine.name: [None] for engine in group.engines}
        self.delivery = DirectDelivery(trainers, receivers, step_deadline_s=STEP_S)
        self.publisher = Publisher(
            DirectSource(self.delivery),
            group.members,
            self.delivery,
            deadline_s=600,
            step_deadline_s=STEP_S,
            encoding="local",
        )
        hf = config_in(trainers.model)
        self.served = Served("tiny", Model(hf, weight_table(hf)), engine_table(hf))
        self.version = self.calls = 0
        """Calls to engines that have begun, in the publication under way."""
        for engine in group.engines:
            engine.perform = self._counted(engine.perform)

    def _counted(self, forward: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def perform(verb: str, epoch: int | None, *arguments: Any, **deadline: float) -> Any:
            self.calls += epoch is not None
            return await forward(verb, epoch, *arguments, **deadline)

        return perform

    async def publish(self, staging: Staging) -> Publication:
        await self.trainers.hold(self.version + 1)
        self.calls, self.version = 0, self.version + 1
        self.publisher.staging = staging
        return await self.publisher.publish(self.version, trainer_step=self.version)

    def expected(self, version: int) -> dict[str, str]:
        """Returns the digest of each parameter that an engine must hold of `version`."""
        tensors = engine_rank(self.served, perturbed(self.weights, seed=version), ENGINE, 0)
        return {name: digest(tensor) for name, tensor in tensors.items()}

    async def digests(self, engine: EngineHandle) -> dict[str, str]:
        """Returns SGLang's own digest of each parameter that an engine holds now."""
        wire = ControlClient(engine.url, keys=engine.spec.keys)
        answer = await wire.call("/weights_checker", {"action": "checksum", "selector": "target"})
        return answer["ranks"][0]["checksums"]

    async def victim(self, moment: Moment) -> int:
        """Returns the id of the process that `moment` strikes."""
        if moment.kind == "sender":
            return await self.trainers.pid(moment.number)
        engine = self.group.engines[moment.number]
        (server,) = [p for p in psutil.process_iter() if serves(p, engine)]
        if moment.kind == "server":
            return server.pid
        if moment.kind == "receiver":
            (owner,) = [p for p in server.parents() if "ray::Engine" in command_of(p)]
            return owner.pid
        return (await ControlClient(engine.url, keys=engine.spec.keys).request_ranks("attest"))[0]["pid"]

    async def back(self) -> None:
        """Waits until every engine runs."""
        async with asyncio.timeout(BACK_S):
            while any(e.state not in (MemberState.JOINING, MemberState.MEMBER) for e in self.group.engines):
                assert self.group.members.failure() is None
                await asyncio.sleep(0.2)


def serves(process: psutil.Process, engine: EngineHandle) -> bool:
    """Returns whether the process has an engine's HTTP port."""
    with suppress(psutil.Error):
        port = int(engine.url.rpartition(":")[2])
        listening = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return port in listening
    return False


def digest(tensor: torch.Tensor) -> str:
    """Returns the first 8 bytes of the SHA-256 of a tensor's bytes, as SGLang's checksums are on the CPU."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


@asynccontextmanager
async def stand(model: Path, weights: Weights, directory: Path) -> AsyncIterator[Stand]:
    publish = {"transport": "nixl", "engine_deadline": STEP_S}
    health = {"interval": 2, "timeout": 60, "restarts": 100, "stable_after": 1}
    async with two_engines(model, directory, start_deadline=BACK_S, publish=publish, health=health) as (group, config):
        plan = plan_for(model, ENGINE, BUCKET_BYTES)
        trainers = DirectTrainers(model, plan, config.cluster.network, step_deadline_s=STEP_S)
        yield Stand(group, trainers, weights)


async def test_no_engine_serves_half_a_version_whichever_process_dies(
    tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    seen: Counter[str] = Counter()
    async with stand(tiny_model, tiny_weights, tmp_path) as deployment:
        usual: dict[Staging, tuple[int, float]] = {}
        for staging in ("model", "bucket", "model", "bucket"):  # the first ones also connect
            done = await deployment.publish(staging)
            usual[staging] = deployment.calls, done.seconds["total"]
            assert done.lost == [] and done.buckets > 8
        for engine in deployment.group.engines:
            assert await deployment.digests(engine) == deployment.expected(deployment.version)
        print(f"a publication has {done.buckets} buckets; calls and seconds: {usual}")
        for number, moment in enumerate(moments(seed=16)):
            outcome = await struck(deployment, moment, *usual[moment.staging])
            seen[outcome] += 1
            print(f"{number}: {moment.signum.name} to {moment.kind} {moment.number} at {moment.share:.2f} of a")
            print(f"    publication by {moment.staging}: {outcome}", flush=True)
    print(dict(seen))
    assert sum(seen.values()) == KILLS + STOPS


async def struck(stand: Stand, moment: Moment, calls: int, seconds: float) -> str:
    """Breaks one publication, which usually makes `calls` calls in `seconds`, and checks the consequences.

    Returns the outcome in a few words.
    """
    members, old = stand.group.members, stand.version
    lost_before = members.lost
    victim = await stand.victim(moment)
    publishing = asyncio.create_task(stand.publish(moment.staging))
    while not publishing.done() and (stand.version == old or stand.calls < moment.share * calls):
        await asyncio.sleep(0.001)
    await asyncio.sleep(moment.later * seconds / calls)
    ended = publishing.done()
    os.kill(victim, moment.signum)
    done, error = None, None
    try:
        done = await publishing
    except SlimxError as problem:
        error = problem
    for number, engine in enumerate(stand.group.engines):
        await assert_whole(stand, engine, old, struck=moment.kind != "sender" and number == moment.number)
    new = stand.version
    outcome = f"published to {len(done.engines) - len(done.lost)}" if done else f"given up ({error.code})"
    outcome += " before" if ended else ""
    if moment.kind == "sender":
        assert members.lost == lost_before, "no engine is to blame"
        name = f"trainer rank {moment.number}"
        about = (
            {error.about, error.__cause__.about} if isinstance(getattr(error, "__cause__", None), SlimxError) else set()
        )
        about |= {getattr(error, "about", ""), getattr(error, "holder", "")}
        assert done is not None or name in about, str(error)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        stand.trainers.replace(moment.number)
        stand.delivery.renew()
    else:
        struck = stand.group.engines[moment.number]
        assert done is not None, str(error)
        other = stand.group.engines[1 - moment.number]
        assert done.lost in ([], [struck.name]) and other.state is MemberState.MEMBER
        if done.lost:
            assert done.engines[struck.name].error.about in (struck.name, "trainers"), done.engines[struck.name].error
            outcome += f", lost by {done.engines[struck.name].error.code} in {done.engines[struck.name].step}"
        # An engine killed after its last step is found by the next look; one that was stopped then serves no requests.
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(BACK_S):
            while members.lost == lost_before:
                await asyncio.sleep(0.2)
        assert members.lost == lost_before + 1
    await stand.back()
    again = await stand.publish(moment.staging)
    assert again.lost == [] and len(again.engines) == 2
    for engine in stand.group.engines:
        assert await stand.digests(engine) == stand.expected(stand.version)
    assert stand.version == new + 1
    return outcome


async def assert_whole(stand: Stand, engine: EngineHandle, old: int, *, struck: bool) -> None:
    """Asserts that an engine that generates holds the version that it reports; otherwise it serves no requests."""
    try:
        async with asyncio.timeout(STEP_S):
            if engine.state is not MemberState.MEMBER or not await engine.perform("serves", None):
                return
            status = (await ControlClient(engine.url, keys=engine.spec.keys).request_ranks("status"))[0]
            digests = await stand.digests(engine)
    except (SlimxError, TimeoutError):
        if not struck:
            raise
        return
    assert status["version"] in (old, stand.version)
    assert digests == stand.expected(status["version"])
