"""Mirrors as the driver manages them: the states of all ranks are stored in the memory of processes that outlive the
ranks.

    node 0: ranks 0 1   --state-->   store on node 1
    node 1: ranks 2 3   --state-->   store on node 0        with a single node, its store has its own ranks' states

A set of mirrors consists of the states of all ranks after the same step. It becomes valid when the stores have verified
all states; until then the previous set is valid. At most two sets are stored. If a store is lost, no set is valid any
more, and the next set is sent to new stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.cluster.waiting import gather, kill
from slimx.errors import DeadlineError, SlimxError, duration, first_line
from slimx.extras.recovery.mirror_store import MirrorLost, MirrorStore
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.runtime.logs import begin_log
from slimx.runtime.tasks import cancelled

_POLL_S = 0.1


def launch_store(node: str) -> Any:
    """Starts a store on the node with the Ray id `node`, and returns its actor."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(MirrorStore).options(num_cpus=0, scheduling_strategy=strategy).remote()


class Mirrors:
    """Manager of mirror sets, each of which contains copies of the states of all `trainers` ranks; at most one set is
    valid at a time."""

    def __init__(
        self,
        trainers: TrainerGroup,
        log_dir: Path,
        note: Callable[[str], None],
        launch: Callable[[str], Any] = launch_store,
    ):
        """Stores the arguments without starting any mirror store. `log_dir`: directory for the stores' logs; `note`:
        shows a line to the user; `launch`: starts a store on the node with a given Ray id."""
        self.trainers = trainers
        self.log_dir = log_dir
        self.note = note
        self._launch = launch
        self.step: int | None = None
        """Step of the valid set; None if no set is valid."""
        self._stores: dict[str, Any] = {}
        """Store actors, by the Ray id of their node."""
        self._mirror_nodes: list[str] = []
        """For each rank, the Ray id of the node that stores its mirror."""
        self._coming: asyncio.Task[None] | None = None

    async def take(self, step: int) -> None:
        """Starts mirroring the state of all ranks after `step` steps, and returns when the ranks may continue. Raises
        the ranks' errors. If a store is lost, no set of mirrors is made for this step."""
        if self._coming is not None:
            await asyncio.wait([self._coming])
        try:
            await self._open()
            action = f"the copy of the state of step {step}"
            await self.trainers.call("mirror.send", action, per_rank=self._stores_of_ranks(), step=step)
        except MirrorLost as error:
            await self._lose(error)
            return
        self._coming = asyncio.create_task(self._complete(step))

    async def interrupt(self) -> None:
        """Cancels a set of mirrors that is still being made, because its ranks have been lost."""
        if self._coming is not None:
            await cancelled(self._coming)
            self._coming = None

    async def restore(self, new: TrainerGroup) -> None:
        """Restores the new ranks `new` to the states in the valid set of mirrors. If the set is incomplete, raises
        MirrorLost without changing any rank, and no set is valid from then on."""
        try:
            mirrors = f"mirrors of step {self.step}"
            await new.call("mirror.fetch", f"the {mirrors}", per_rank=self._stores_of_ranks(), step=self.step)
            await new.call("mirror.restore", f"loading the {mirrors}", step=self.step)
        except MirrorLost as error:
            await self._lose(error)
            raise

    def _stores_of_ranks(self) -> list[tuple[Any]]:
        return [(self._stores[node],) for node in self._mirror_nodes]

    async def stop(self) -> None:
        """Ends all stores. Never raises an exception."""
        await self.interrupt()
        await self._end()

    async def _open(self) -> None:
        """Starts a store on every node that has ranks, if no stores are running."""
        if self._stores:
            return
        nodes = list(dict.fromkeys(rank["node"] for rank in self.trainers.started))
        after = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        self._stores = {node: self._launch(node) for node in nodes}
        for index in range(len(nodes)):
            begin_log(self._log(index))
        await self._all("ready", *([str(self._log(index))] for index in range(len(nodes))))
        self._mirror_nodes = [after[rank["node"]] for rank in self.trainers.started]
        if len(nodes) == 1:
            self.note(
                "all trainers and their mirrors are on one node, so the loss of this node loses both; add "
                "nodes to the cluster"
            )

    async def _complete(self, step: int) -> None:
        """Waits until the stores have verified the states of all ranks after `step`, and makes them drop all other
        states."""
        limit = self.trainers.config.trainer.deadline
        try:
            async with asyncio.timeout(limit):
                arguments = [[step]] * len(self._stores)
                while sum(map(len, await self._all("complete", *arguments))) < len(self._mirror_nodes):
                    await asyncio.sleep(_POLL_S)
            await self._all("commit", *arguments)
            self.step = step
        except TimeoutError:
            self.note(
                f"the mirrors of step {step} were not complete within {duration(limit)}; recovery uses previous mirrors"
            )
        except MirrorLost as error:
            await self._lose(error)

    async def _all(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Calls `method` on every store, each with its item of `arguments`, and returns the results. Raises MirrorLost
        if a call fails."""
        holders = [f"the mirrors on node {index}" for index in range(len(self._stores))]
        try:
            calls = []
            for store, values in zip(self._stores.values(), arguments, strict=True):
                calls.append(getattr(store, method).remote(*values))
            return await gather(
                calls,
                what=f"{method} of mirrors",
                holders=holders,
                deadline_s=self.trainers.start_deadline_s,
                logs=[self._log(index) for index in range(len(self._stores))],
            )
        except (DeadlineError, SlimxError) as error:
            raise MirrorLost(first_line(error), code="mirror.lost", about="mirrors") from error

    def _log(self, index: int) -> Path:
        return self.log_dir / f"mirrors-{index}.log"

    async def _lose(self, error: SlimxError) -> None:
        """Ends all stores, which invalidates the current set; new stores are started for the next set. `error`:
        describes what was lost."""
        self.note(f"mirrors are lost: {first_line(error)}")
        await self._end()

    async def _end(self) -> None:
        stores = list(self._stores.values())
        self._stores = {}
        self.step = None
        await kill(stores)
