"""An engine's offer to the trainer ranks: memory to write into, and the offset of each run of bytes in it.

A *run* is the consecutive pieces that one trainer rank packs of one bucket for one engine rank
(`slimx.reshard.pack.pieces.compact`). It is sent as is, or with `publish.delta` as a header and the frame of its
changes (`deltas.py`). The offer is sent over the run's control channel, in this schema; only the agent's metadata is in
NIXL's opaque format."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from slimx.errors import SlimxError
from slimx.extras.direct.ends import frames
from slimx.reshard.pack.pieces import PlannedBuckets, pieces_of, run_bytes
from slimx.reshard.plan.copy_plan import Plan

HEADER = np.dtype([("base", "<i8"), ("length", "<i8")])
"""Before a frame: the transfer whose bytes it changes (NO_BASE: it has no base), and bytes of the frame."""
NO_BASE = 0
"""Index of no transfer; transfers count from 1."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory of an agent, in bytes."""

    address: int
    nbytes: int
    device: int = -1
    """Index of the GPU in the process that owns it; -1: host memory."""


class PackedRun(msgspec.Struct, frozen=True, array_like=True):
    """Location of one run in each of an offer's slots."""

    bucket: int
    source: int
    """Trainer rank that writes it."""
    rank: int
    """Engine rank that receives it."""
    offset: int
    """Bytes from the start of the slot."""
    nbytes: int


class Offer(msgspec.Struct, frozen=True):
    """Memory of one engine that trainer ranks may write into."""

    engine: str
    metadata: bytes
    """Connection data and keys of the engine's agent."""
    slots: tuple[Region, ...]
    """Slots; bucket b arrives in slot b modulo their number."""
    runs: tuple[PackedRun, ...]
    item: int = 0
    """Bytes of an element if runs are sent as frames (`slimx.extras.direct.ends.deltas`), 0 if as they are."""

    def of(self, source: int) -> Offer:
        """Returns the same offer with only the runs of trainer rank `source`."""
        return msgspec.structs.replace(self, runs=tuple(run for run in self.runs if run.source == source))

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Returns the offer that `to_bytes` wrote. Raises SlimxError for anything else, or a run outside its slots."""
        try:
            offer = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise SlimxError(
                f"an engine's offer of memory cannot be read ({error}); run the same slimx on every machine",
                code="direct.offer",
                about="offer",
            ) from None
        if offer.item not in (0, *frames.ITEMS):
            raise SlimxError(
                f"engine {offer.engine} requests changes in elements of {offer.item} bytes; run the same slimx on "
                "every machine",
                code="direct.item",
                about=offer.engine,
            )
        room = min((slot.nbytes for slot in offer.slots), default=0)
        for run in offer.runs:
            if min(msgspec.structs.astuple(run)) < 0 or run.offset + room_of(run.nbytes, offer.item) > room:
                raise SlimxError(
                    f"engine {offer.engine} offers {room} bytes, but requests trainer rank {run.source} to write "
                    f"{run.nbytes} at {run.offset}; run the same slimx on every machine",
                    code="direct.extent",
                    about=offer.engine,
                )
        return offer


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """Notifies an engine that all runs of one trainer rank for a bucket are in its memory."""

    transfer: int
    """Index of the publication, counted by the run's driver; a repeated publication has a new one."""
    bucket: int
    source: int

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Notice | None:
        """Parses a notice. Returns None for any other message: anyone who reaches the port can send one."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None


def sizes_of_runs(buckets: PlannedBuckets, bucket: int, moves: np.ndarray, by: str) -> Iterator[tuple[int, int]]:
    """Yields (index, bytes) of the runs of `moves` of `bucket`, for each index in their column `by`: "source" or
    "target", by which they are sorted."""
    if not len(moves):
        return
    nbytes = run_bytes(pieces_of(buckets.plan, moves, buckets.form(bucket), None))
    indices, first = np.unique(moves[by], return_index=True)
    yield from zip(indices.tolist(), np.add.reduceat(nbytes, first).tolist(), strict=True)


def room_of(nbytes: int, item: int) -> int:
    """Returns the bytes in a ring or slot for a run of `nbytes`, as it is, or with `item` as header and frame."""
    if not item:
        return nbytes
    return -(-(HEADER.itemsize + frames.room(nbytes)) // frames.STEP) * frames.STEP


def arrivals(parts: list[Plan], item: int = 0) -> tuple[list[PackedRun], int]:
    """Returns the locations of all runs of an engine whose ranks receive `parts`, each a plan of one target, and the
    bytes of a slot.

    `item`: as in `Offer`."""
    runs = []
    room = 0
    planned = [PlannedBuckets(part) for part in parts]
    for bucket in range(parts[0].count):
        offset = 0
        for rank, buckets in enumerate(planned):
            moved = buckets.plan.moved
            for source, nbytes in sizes_of_runs(buckets, bucket, moved[moved["bucket"] == bucket], "source"):
                runs.append(PackedRun(bucket, source, rank, offset, nbytes))
                offset += room_of(nbytes, item)
        room = max(room, offset)
    return runs, room
