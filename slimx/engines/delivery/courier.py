"""The courier: it takes packed buckets from the publisher's memory and sends them to engines, or writes them.

A process of its own beside the publishing trainer: it sends one bucket while the trainers pack the next, and a
transport that breaks takes no trainer along. One that dies is started again, as an engine is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slimx.cluster.calls import kill
from slimx.cluster.place import DEVICES, Placement, place_of
from slimx.cluster.restarts import Restarts, told_of
from slimx.cluster.waiting import ActorDied, first_line, gather
from slimx.config.schema import Config
from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import TransportLost
from slimx.reshard.transports.collective import Backend, Meeting, Opening, Sending
from slimx.reshard.transports.disk import Shelf
from slimx.reshard.transports.disk_changes import ChangesShelf
from slimx.reshard.transports.landing import bytes_of
from slimx.reshard.transports.memory import open_memory
from slimx.runtime.ports import own_address


class Courier:
    """A Ray actor whose calls run in threads."""

    def __init__(
        self,
        directory: str,
        network: str | None,
        deadline_s: float,
        log_path: str,
        gpus: str | None,
        changes: tuple[int, int] | None = None,
    ):
        """`directory`: of versions on disk; `changes`: None where these are whole, else of what
        `ChangesShelf` is made; `network`: where meetings are held (`slimx.runtime.ports.own_address`);
        `deadline_s`: seconds for one step of a channel; what the process prints goes to `log_path`; `gpus`: those of
        the publisher, of which it shares the first."""
        with open(log_path, "ab", buffering=0) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        if gpus is not None:
            os.environ[DEVICES] = gpus
        self.shelf = Shelf(directory) if changes is None else ChangesShelf(directory, *changes)
        self.deadline_s = deadline_s
        self.host = own_address(network)
        self.openings: dict[str, Opening] = {}
        self.channels: dict[str, Sending] = {}

    def ready(self) -> None:
        """Answers once the process has started."""

    def begin(self, manifest: Manifest) -> None:
        self.shelf.begin(manifest)

    def write(self, bucket: int, packed: PackedBucket) -> PackedBucket:
        return self.shelf.add(bucket, packed, open_memory(packed.path, packed.size))

    def commit(self) -> None:
        self.shelf.commit()

    def open(self, engine: str, epoch: int, backend: Backend, machines: int) -> Meeting:
        """Open a meeting for the `machines` of `engine`; the channel that it had is closed."""
        if (old := self.channels.pop(engine, None)) is not None:
            old.close()
        opening = Sending.open(
            engine, epoch, ranks=machines, host=self.host, backend=backend, deadline_s=self.deadline_s
        )
        self.openings[engine] = opening
        return opening.meeting

    def join(self, engine: str) -> None:
        self.channels[engine] = self.openings.pop(engine).join()

    def send(self, engine: str, packed: PackedBucket) -> None:
        with bytes_of(packed) as data:
            self.channels[engine].broadcast(data)


class CourierHandle:
    """The courier as deliveries see it, through all its restarts."""

    def __init__(self, publisher: Callable[[], Any], config: Config, directory: Path, log: Path, restarts: Restarts):
        """`publisher`: gives the present actor of the publishing trainer rank. `directory`: of versions on disk."""
        self.publisher, self.config, self.directory, self.log = publisher, config, directory, log
        self.restarts = restarts
        self._lost = SlimxError("the courier was ended", code="courier.ended", about="courier")
        """Error that says why the courier does not run."""
        self.incarnation = 0
        self._actor: Any = None
        self._place: Placement | None = None
        """Placement of the publisher beside which the courier was started."""
        self._renewed = False

    async def start(self) -> None:
        """Start the courier, unless it runs. Raises SlimxError when it may not be started again, TransportLost when a
        restart failed."""
        if self._actor is not None and self._renewed and await self._publisher_place() != self._place:
            await self.stop()
            await self._start()
        self._renewed = False
        if self._actor is not None:
            return
        if self.incarnation == 0:
            await self._start()
        elif self.restarts.left:
            await asyncio.sleep(self.restarts.pause)
            try:
                with self.restarts.attempt(self._lost):
                    await self._start()
            except SlimxError as error:
                self._lost = error
                raise TransportLost(first_line(error), code="courier.restart", about="courier") from None
        else:
            raise PartLost(
                f"the courier beside trainer rank 0 was lost and may not be started again (rollout.health.restarts is "
                f"{self.config.rollout.health.restarts}): {told_of(self.restarts.history)}; look into {self.log}",
                code="courier.gone",
                about="courier",
            )
        self.restarts.serves()

    async def _start(self) -> None:
        limit = self.config.cluster.start_deadline
        place = self._place = await self._publisher_place()
        actor = ray.remote(Courier).options(
            max_concurrency=sum(group.servers for group in self.config.rollout.policy_engines) + 1,
            **place.options(cpus=0),
        )
        network = self.config.cluster.network
        gpus = None if place.gpus is None else ",".join(place.gpus)
        publish, log = self.config.publish, str(self.log)
        courier = actor.remote(
            str(self.directory), network, publish.engine_deadline, log, gpus, publish.changes_on_disk
        )
        await self._answer(courier.ready.remote(), "the start", limit)
        self._actor = courier
        self.incarnation += 1

    def renew(self) -> None:
        """The publisher is another process from now on, maybe elsewhere: `start` looks, and the courier follows."""
        self._renewed = True

    async def _publisher_place(self) -> Placement:
        asked = self.publisher().__ray_call__.remote(place_of)
        return await self._answer(asked, "the look for its machine", self.config.cluster.start_deadline)

    async def ask(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """One of Courier's methods, in twice the time of a step of a publication unless `deadline_s` is given.

        Raises TransportLost if it died, or did not answer and so was ended; `start` brings another one.
        """
        if (actor := self._actor) is None:
            raise TransportLost(
                "the courier beside trainer rank 0 does not run; publish again", code="courier.down", about="courier"
            )
        try:
            reference = getattr(actor, method).remote(*arguments)
            return await self._answer(reference, method, deadline_s or 2 * self.config.publish.engine_deadline)
        except (ActorDied, DeadlineError) as error:
            if self._actor is actor:
                self._lost = error
                self.restarts.lost()
                await self.stop()
            raise TransportLost(first_line(error), code="courier.lost", about="courier") from None

    async def _answer(self, reference: Any, what: str, deadline_s: float) -> Any:
        (out,) = await gather(
            [reference],
            what=f"{what} of the courier",
            holders=["the courier beside trainer rank 0"],
            deadline_s=deadline_s,
            logs=[self.log],
        )
        return out

    async def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            await kill([actor])
