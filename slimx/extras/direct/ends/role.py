"""Role "direct" of a trainer rank: writes the rank's weights directly to engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from slimx.extras.direct.ends.offer import Offer
from slimx.extras.direct.ends.sender import DirectSender
from slimx.extras.direct.ends.sent_bucket import SentBucket
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import Plan
from slimx.runtime.ports import local_address
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank
from slimx.trainer.trained_model import TrainedModel


class DirectRole:
    """Sender of direct transfers on one trainer rank, as a `slimx.trainer.rank.Role`."""

    def __init__(self, rank: TrainerRank):
        self.rank = rank.number
        self.model = cast(TrainedModel, rank.roles["model"])
        self.model.on_moved.append(self._refresh_addresses)
        self._sender: DirectSender | None = None

    def reload(self, *, training: bool = True) -> None:
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Does nothing, because memory that is registered with NIXL stays allocated."""

    @operation()
    def prepare(self, *, plan: bytes, edges: Sequence[int], item: int, on_gpu: bool) -> None:
        """Prepares to write buckets to all engines. `plan`: serialized plan of the moves to all engines, with the
        sender chosen for each. `edges`, `item`, `on_gpu`: as in `DirectSender`."""
        weights = self.model.weights
        dealt = Plan.from_bytes(plan)
        parameters, derived = weights.attached.leaving("publish", dealt, self.rank, weights.parameters)
        packer = Packer(dealt, self.rank, parameters, derived=derived)
        host = local_address(self.model.config.cluster.network)
        name = f"trainer rank {self.rank} ({os.getpid()})"
        self._sender = DirectSender(packer, name, host, edges=edges, item=item, on_gpu=on_gpu)

    @operation()
    def connect(self, offer: bytes, *, engine: int) -> None:
        """Connects to the memory that receiver `engine` offers. `offer`: a serialized
        `slimx.extras.direct.ends.offer.Offer`."""
        self._prepared.connect(engine, Offer.from_bytes(offer))

    @operation("publish", needs="weights")
    def send(self, *, bucket: int, transfer: int, engines: dict[int, int]) -> SentBucket:
        """Packs this rank's part of a bucket and starts writing it to `engines`. The arguments are those of
        `DirectSender.send`."""
        return self._prepared.send(bucket, transfer, engines)

    @property
    def _prepared(self) -> DirectSender:
        """Sender that `prepare` created."""
        assert self._sender is not None, "call prepare first"
        return self._sender

    def _refresh_addresses(self) -> None:
        if self._sender is not None:
            self._sender.packer.refresh_addresses()
