"""Messages between trainer ranks and engines: an engine's offer of memory to write into, and notices of arrived bytes.

A *run* is a contiguous range of bytes: the pieces of one bucket that one trainer rank packs for one engine rank
(`slimx.reshard.pack.pieces.compact`). A run is sent as it is, or with `publish.delta` as a header and a frame of
changes (`deltas.py`). An offer is sent by Ray calls in the schema of this file; only the metadata of the NIXL agent is
in NIXL's opaque format."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from slimx.errors import SlimxError
from slimx.extras.direct.ends import frames
from slimx.reshard.pack.pieces import PlannedBuckets, pieces_of, run_bytes
from slimx.reshard.plan.copy_plan import Plan

HEADER = np.dtype([("base", "<i8"), ("length", "<i8")])
"""Header of a frame: `base`, the index of the transfer to whose bytes the frame's changes apply (NO_BASE if the frame
contains all bytes), and `length`, the size of the frame in bytes."""
NO_BASE = 0
"""Placeholder for a transfer's index if there are no earlier bytes to which changes could apply; actual indices start
at 1."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Range of an agent's memory: `nbytes` bytes from `address` on."""

    address: int
    nbytes: int
    device: int = -1
    """Index of the GPU in the process that owns the memory; -1 for host memory."""


class PackedRun(msgspec.Struct, frozen=True, array_like=True):
    """Location of one run (a contiguous range of bytes) within the offered slot in which its bucket arrives."""

    bucket: int
    source: int
    """Trainer rank that writes this byte range."""
    rank: int
    """Engine rank that receives this byte range."""
    offset: int
    """Offset in bytes of this byte range from the start of the slot."""
    nbytes: int


class Offer(msgspec.Struct, frozen=True):
    """Receiver memory into which trainer ranks may write, with the location of each run: the contiguous range of bytes
    that one rank writes for a bucket."""

    engine: str
    metadata: bytes
    """Connection data and keys of the receiver's NIXL agent."""
    slots: tuple[Region, ...]
    """Regions of memory; bucket b arrives in slot b modulo the number of slots."""
    runs: tuple[PackedRun, ...]
    item: int = 0
    """Element size in bytes if trainer ranks send frames of changes (`slimx.extras.direct.ends.deltas`); 0 if they send
    the bytes unencoded."""

    def of(self, source: int) -> Offer:
        """Returns a copy of the offer that contains only the runs (byte ranges) of trainer rank `source`."""
        return msgspec.structs.replace(self, runs=tuple(run for run in self.runs if run.source == source))

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Decodes an offer that `to_bytes` encoded. Raises SlimxError for any other data, or if one of the offer's runs
        (byte ranges) is outside its slot."""
        try:
            offer = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise SlimxError(
                f"a memory offer of {len(data)} bytes from an engine cannot be decoded ({error}); install the same "
                "version of slimx on every machine",
                code="direct.offer",
                about="offer",
            ) from None
        if offer.item not in (0, *frames.ITEMS):
            raise SlimxError(
                f"engine {offer.engine} requests changes in elements of {offer.item} bytes, but only elements of "
                f"{' or '.join(map(str, frames.ITEMS))} bytes are supported; install the same version of slimx on "
                "every machine",
                code="direct.item",
                about=offer.engine,
            )
        room = min((slot.nbytes for slot in offer.slots), default=0)
        for run in offer.runs:
            if min(msgspec.structs.astuple(run)) < 0 or run.offset + room_of(run.nbytes, offer.item) > room:
                raise SlimxError(
                    f"engine {offer.engine} offers {room} bytes, but expects trainer rank {run.source} to write "
                    f"{run.nbytes} bytes at offset {run.offset}; install the same version of slimx on every machine",
                    code="direct.extent",
                    about=offer.engine,
                )
        return offer


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """Message that tells a receiver that everything one trainer rank writes for a bucket is now in the receiver's
    memory."""

    transfer: int
    """Index of the transfer, as numbered by the driver; a repeated publication has a new index."""
    bucket: int
    source: int

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Notice | None:
        """Decodes a notice that `to_bytes` encoded. Returns None for any other message: any process that can reach the
        agent's port can send one."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None


def sizes_of_runs(buckets: PlannedBuckets, bucket: int, moves: np.ndarray, by: str) -> Iterator[tuple[int, int]]:
    """Yields (rank, number of bytes) for each run, the contiguous range of bytes that the `moves` of one rank form in
    `bucket`. `by`: column of `moves` that contains the rank, "source" or "target"; `moves` are sorted by this
    column."""
    if not len(moves):
        return
    nbytes = run_bytes(pieces_of(buckets.plan, moves, buckets.form(bucket), None))
    indices, first = np.unique(moves[by], return_index=True)
    yield from zip(indices.tolist(), np.add.reduceat(nbytes, first).tolist(), strict=True)


def room_of(nbytes: int, item: int) -> int:
    """Returns the number of bytes to reserve in a buffer for a range of `nbytes` bytes: `nbytes` itself if `item` is 0,
    else the maximum size of header and frame."""
    if not item:
        return nbytes
    return -(-(HEADER.itemsize + frames.room(nbytes)) // frames.STEP) * frames.STEP


def arrivals(parts: list[Plan], item: int = 0) -> tuple[list[PackedRun], int]:
    """Returns the locations of all runs (byte ranges) that are written to a receiver, and the size in bytes of each of
    the receiver's slots.

    `parts`: for each engine rank that the receiver serves, the plan of the bytes for this rank. `item`: as in
    `Offer`."""
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
