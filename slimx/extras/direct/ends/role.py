"""Operations of a trainer rank that writes its weights straight to engines (role "direct")."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slimx.extras.direct.ends.copies import SentBucket
from slimx.extras.direct.ends.offer import Offer
from slimx.extras.direct.ends.sender import Sender
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import Plan
from slimx.runtime.ports import local_address
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank


class DirectRole:
    """One rank's end of direct transfers; see `slimx.trainer.rank.Role`."""

    def __init__(self, rank: TrainerRank):
        self.rank, self.model = rank.number, rank.roles["model"]
        self.model.on_moved.append(self._refresh_addresses)
        self._sender: Sender | None = None

    def reload(self, *, training: bool = True) -> None:
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Registered memory stays."""

    @operation()
    def prepare(self, *, plan: bytes, edges: Sequence[int], item: int, on_gpu: bool) -> None:
        """Get ready to write buckets of a dealt plan to all engines; `edges`, `item`, `on_gpu`: as for `Sender`."""
        weights = self.model.weights
        whole = Plan.from_bytes(plan)
        parameters, made = weights.attached.leaving("publish", whole, self.rank, weights.parameters)
        packer = Packer(whole, self.rank, parameters, made=made)
        host = local_address(self.model.config.cluster.network)
        name = f"trainer rank {self.rank} ({os.getpid()})"
        self._sender = Sender(packer, name, host, edges=edges, item=item, on_gpu=on_gpu)

    @operation()
    def connect(self, offer: bytes, *, engine: int) -> None:
        """Get to know the memory that `engine` offers (`slimx.extras.direct.ends.offer.Offer`)."""
        self._sender.connect(engine, Offer.from_bytes(offer))

    @operation("publish", needs="weights")
    def send(self, *, bucket: int, transfer: int, engines: dict[int, int]) -> SentBucket:
        """Pack this rank's part of a bucket and begin to write it to `engines` (`Sender.send`)."""
        return self._sender.send(bucket, transfer, engines)

    def _refresh_addresses(self) -> None:
        if self._sender is not None:
            self._sender.packer.refresh_addresses()
