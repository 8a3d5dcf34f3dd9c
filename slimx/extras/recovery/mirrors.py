"""The states of all ranks in the memory of processes that outlive them: the driver's side.

    node 0: ranks 0 1   --state-->   store on node 1
    node 1: ranks 2 3   --state-->   store on node 0        with one node it keeps its own

A set of mirrors counts once the stores have proven those of every rank; until then the one before does. At most two are
held. A store that is lost takes its mirrors along: none count any more, and another one starts with the next set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.cluster.waiting import first_line, gather, kill
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.recovery.mirror_store import MirrorLost, MirrorStore
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.runtime.logs import begin_log
from slimx.runtime.tasks import cancelled

_POLL_S = 0.1


def launch_store(node: str) -> Any:
    """Start a store on the machine that Ray knows by the id `node`."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(MirrorStore).options(num_cpus=0, scheduling_strategy=place).remote()


class Mirrors:
    """Sets of mirrors of `trainers`, one at a time."""

    def __init__(
        self,
        trainers: TrainerGroup,
        log_dir: Path,
        note: Callable[[str], None],
        launch: Callable[[str], Any] = launch_store,
    ):
        """`launch`: starts a store on the machine that Ray knows by an id."""
        self.trainers, self.log_dir, self.note, self._launch = trainers, log_dir, note, launch
        self.step: int | None = None
        """Step of the set that counts; None: there is none."""
        self._stores: dict[str, Any] = {}
        """By Ray's id of a machine the process there."""
        self._of_rank: list[str] = []
        """By rank the machine that keeps its mirror."""
        self._coming: asyncio.Task[None] | None = None

    async def take(self, step: int) -> None:
        """Begin a set of the present state of all ranks, that after `step` steps; returns when ranks may go on. Raises
        what ranks raise; that a store is lost only leaves the set out."""
        if self._coming is not None:
            await asyncio.wait([self._coming])
        try:
            await self._open()
            what = f"the copy of the state of step {step}"
            await self.trainers.call("mirror.send", what, per_rank=self._stores_of_ranks(), step=step)
        except MirrorLost as error:
            await self._lose(error)
            return
        self._coming = asyncio.create_task(self._complete(step))

    async def interrupt(self) -> None:
        """Wait no more for a set whose ranks have ended."""
        if self._coming is not None:
            await cancelled(self._coming)
            self._coming = None

    async def restore(self, new: TrainerGroup) -> None:
        """Bring new ranks to the set that counts. Raises MirrorLost, with no rank changed, if it is not whole any more;
        it counts no longer then."""
        try:
            each, what = self._stores_of_ranks(), f"mirrors of step {self.step}"
            await new.call("mirror.fetch", f"the {what}", per_rank=each, step=self.step)
            await new.call("mirror.restore", f"loading the {what}", step=self.step)
        except MirrorLost as error:
            await self._lose(error)
            raise

    def _stores_of_ranks(self) -> list[tuple[Any]]:
        return [(self._stores[node],) for node in self._of_rank]

    async def stop(self) -> None:
        """End all stores; does not raise."""
        await self.interrupt()
        await self._end()

    async def _open(self) -> None:
        """Have a store on every machine that shall keep mirrors."""
        if self._stores:
            return
        nodes = list(dict.fromkeys(rank["node"] for rank in self.trainers.started))
        after = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        self._stores = {node: self._launch(node) for node in nodes}
        for number in range(len(nodes)):
            begin_log(self._log(number))
        await self._all("ready", *([str(self._log(number))] for number in range(len(nodes))))
        self._of_rank = [after[rank["node"]] for rank in self.trainers.started]
        if len(nodes) == 1:
            self.note("all trainers are on one node, which keeps their mirrors itself: they are lost with it")

    async def _complete(self, step: int) -> None:
        """Wait until the stores have proven all ranks' states of `step`, and have them drop the others."""
        limit = self.trainers.config.trainer.deadline
        try:
            async with asyncio.timeout(limit):
                given = [[step]] * len(self._stores)
                while sum(map(len, await self._all("whole", *given))) < len(self._of_rank):
                    await asyncio.sleep(_POLL_S)
            await self._all("commit", *given)
            self.step = step
        except TimeoutError:
            self.note(f"the mirrors of step {step} have not come within {limit:.0f} s; those before are kept")
        except MirrorLost as error:
            await self._lose(error)

    async def _all(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Answers of all stores to calls with each one's own arguments. Raises MirrorLost if one has none."""
        holders = [f"the mirrors on node {number}" for number in range(len(self._stores))]
        try:
            return await gather(
                [
                    getattr(store, method).remote(*own)
                    for store, own in zip(self._stores.values(), arguments, strict=True)
                ],
                what=f"{method} of mirrors",
                holders=holders,
                deadline_s=self.trainers.start_deadline_s,
                logs=[self._log(number) for number in range(len(self._stores))],
            )
        except (DeadlineError, SlimxError) as error:
            raise MirrorLost(first_line(error), code="mirror.lost", about="mirrors") from error

    def _log(self, number: int) -> Path:
        return self.log_dir / f"mirrors-{number}.log"

    async def _lose(self, error: SlimxError) -> None:
        """Count no mirrors any more; the next set begins with new stores."""
        self.note(f"mirrors are lost: {first_line(error)}")
        await self._end()

    async def _end(self) -> None:
        stores, self._stores, self.step = list(self._stores.values()), {}, None
        await kill(stores)
