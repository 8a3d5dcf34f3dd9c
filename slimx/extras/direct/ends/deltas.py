"""Deltas on direct transfers (`publish.delta`): sender and receiver keep the bytes of the last transfer, and only
changes are sent.

Each run, a contiguous range of bytes (`offer.py`), is sent as a header and a frame, which encodes the changes
(`frames.py`):

    trainer rank   SentRuns       packed run, compared with the run sent last  ->  frame in the sender's ring
    engine         ReceivedRuns   frame in a slot, applied to the run received last  ->  the whole run as packed

An engine reports for each bucket the index of the transfer whose bytes it has. If the sender no longer has the bytes of
that transfer, because of a restart, a failed transfer or a missed bucket, it sends full runs. Engines verify the whole
tensors afterwards, as in every publication."""

from __future__ import annotations

import torch

from slimx.errors import SlimxError
from slimx.extras.direct.ends import frames
from slimx.extras.direct.ends.agent import LinkError
from slimx.extras.direct.ends.offer import HEADER, NO_BASE, PackedRun, room_of


class SentRuns:
    """Bytes that a trainer rank last sent to each engine, by bucket and target, stored in host memory."""

    def __init__(self, item: int):
        """Creates an empty store. `item`: size in bytes of the elements that are compared to find changes."""
        self.item = item
        self._runs: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """(bucket, target) -> index of the transfer, and the bytes sent in it."""

    def write(
        self, bucket: int, target: int, fresh: torch.Tensor, out: torch.Tensor, *, transfer: int, base: int
    ) -> int:
        """Encodes the run (byte range) `fresh`, uint8 [bytes], as header and frame in `out`, and stores its bytes as
        those sent in `transfer`. Returns the number of bytes to send.

        `out`: uint8 [room_of(bytes)]. `base`: index of the transfer whose bytes the engine has. The frame contains only
        the changes relative to these bytes if this store still has them, else all bytes of `fresh`."""
        last_transfer, run = self._runs.get((bucket, target), (NO_BASE, None))
        if run is None:
            run = torch.empty(len(fresh), dtype=torch.uint8)
        if last_transfer != base:
            base = NO_BASE
        header = out[: HEADER.itemsize]
        frame = out[HEADER.itemsize :]
        length = frames.encode(None if base == NO_BASE else run, fresh, frame, item=self.item)
        header.numpy().view(HEADER)[0] = (base, length)
        # The engine applies the same frame, so both store the same bytes.
        frames.apply(frame[:length], run, item=self.item)
        self._runs[bucket, target] = transfer, run
        return HEADER.itemsize + length


class ReceivedRuns:
    """Bytes that an engine last received, stored in host memory by run: the range of a bucket's bytes that one trainer
    rank sends to one engine rank."""

    def __init__(self, item: int, buckets: int):
        self.item = item
        self.bases = [NO_BASE] * buckets
        """Bucket -> index of the transfer in which all stored bytes of the bucket were received; NO_BASE if they are
        from different transfers or missing."""
        self._runs: dict[PackedRun, torch.Tensor] = {}

    def run(self, run: PackedRun) -> torch.Tensor:
        """Returns the buffer that stores the bytes of `run`, uint8 [bytes]. The first call creates the buffer, filled
        with zeros; later calls return the same one."""
        if run not in self._runs:
            self._runs[run] = torch.zeros(run.nbytes, dtype=torch.uint8)
        return self._runs[run]

    def take(self, engine: str, bucket: int, transfer: int, runs: list[PackedRun], slot: torch.Tensor) -> None:
        """Applies the received frames (encoded changes) of all `runs` (byte ranges) of `bucket` to the stored bytes.
        `slot`: memory with the frames, uint8 [bytes].

        Raises LinkError naming the trainer rank whose frame is invalid or refers to a transfer other than the stored
        one."""
        base = self.bases[bucket]
        self.bases[bucket] = NO_BASE
        for run in runs:
            received = slot[run.offset : run.offset + room_of(run.nbytes, self.item)]
            # The header is copied before it is checked, because the sender could still change the slot.
            frame_base, length = received[: HEADER.itemsize].clone().numpy().view(HEADER)[0].tolist()
            rank = f"trainer rank {run.source}"
            if frame_base not in (NO_BASE, base):
                raise LinkError(
                    f"engine {engine} has the bytes of transfer {base} for bucket {bucket}, but {rank} sent changes "
                    f"relative to transfer {frame_base}; publish again to send full weights",
                    code="direct.base",
                    about=rank,
                )
            frame = received[HEADER.itemsize :]
            if not 0 <= length <= frames.room(run.nbytes):
                reason = f"the frame has {length} bytes, but must have 0 to {frames.room(run.nbytes)} bytes"
                raise _broken(engine, bucket, rank, reason)
            try:
                frames.apply(frame[:length], self.run(run), item=self.item)
            except SlimxError as error:
                raise _broken(engine, bucket, rank, str(error).partition("; ")[0]) from None
        self.bases[bucket] = transfer


def _broken(engine: str, bucket: int, rank: str, reason: str) -> LinkError:
    return LinkError(
        f"engine {engine} cannot receive bucket {bucket} from {rank}, because {reason}; install the same version of "
        "slimx on every machine",
        code="direct.frame",
        about=rank,
    )
