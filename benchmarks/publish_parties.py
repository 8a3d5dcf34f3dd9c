"""The participants of a publication between hosts, as slimx's publisher calls them: trainers, engines and
membership."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from publish_hosts import Resident

from slimx.errors import SlimxError
from slimx.extras.direct.ends.offer import Offer
from slimx.extras.direct.ends.receiver import Invitation
from slimx.extras.direct.ends.sent_bucket import SentBucket
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import LocalRecipient, ReceiverLost
from slimx.reshard.plan.copy_plan import Plan


class Living:
    """A process that answers pings as its Ray actor would: with one of Ray's errors once it has ended."""

    def __init__(self, process: Any):
        self.process, self.ping = process, self

    async def remote(self) -> None:
        if not self.process.is_alive():
            raise ray.exceptions.ActorDiedError()


class Trainers:
    """The sending trainer ranks, as the delivery calls them."""

    def __init__(self, ranks: Sequence[Resident], plan: Plan):
        """Stores ranks and plan. `plan`: plan for one engine."""
        self.published = plan
        self.ranks, self.actors = ranks, [Living(rank.process) for rank in ranks]

    async def prepare(self, dealt: Plan, edges: list[int], item: int, on_gpus: bool) -> None:
        data = dealt.to_bytes()
        await self._all("prepare", [(data, edges, item)] * len(self.ranks))

    async def connect(self, engine: int, offer: Offer) -> None:
        await self._all("connect", [(engine, offer.of(rank).to_bytes()) for rank in range(len(self.ranks))])

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        return await self._all("send", [(bucket, transfer, engines)] * len(self.ranks))

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = zip(self.ranks, arguments, strict=True)
        return await asyncio.gather(*(asyncio.to_thread(rank.ask, method, *one) for rank, one in calls))


class Engine(LocalRecipient):
    """An engine host, as the publisher calls it."""

    def __init__(self, number: int, resident: Resident, plan: Plan):
        self.name, self.resident = f"e{number}", resident
        self._forms = PlannedBuckets(plan).forms()

    async def inventory(self, encoding: str) -> list[dict[str, str]]:
        return self._forms

    async def transport(self, method: str, *arguments: Any) -> Any:
        return await getattr(self, method)(*arguments)

    async def join(self, invitations: list[Invitation]) -> list[Offer]:
        return [await self._ask("join", *invitations)]

    async def begin(self, manifest: Any, staging: str) -> None: ...

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        await self._ask("receive", packed)

    async def abort(self) -> None:
        await self._ask("drop")

    async def pause(self) -> None: ...

    async def load(self) -> None:
        await self._ask("load")

    async def verify(self) -> dict[str, int]:
        return {"checked": await self._ask("verify")}

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(self.resident.ask, method, *arguments)
        except (EOFError, OSError) as error:  # the process has ended, or is silent
            raise ReceiverLost(f"engine {self.name} is gone: {error}", code="engine.gone", about=self.name) from None


class Members:
    """The engines; one that fails is removed."""

    def __init__(self, engines: Sequence[Engine]):
        self.engines, self.epoch = list(engines), 0
        self.lost: dict[str, SlimxError] = {}

    def candidates(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.name not in self.lost]

    async def quarantine(self, engine: Engine, error: SlimxError) -> None:
        self.lost[engine.name] = error
        self.epoch += 1

    async def admit(self, engine: Engine) -> None: ...
