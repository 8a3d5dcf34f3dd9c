"""Deltas on direct transfers (`publish.delta`): both ends keep the bytes that were sent last, and changes are sent.

Each run of bytes (`offer.py`) is sent as a header and a frame (`frames.py`):

    trainer rank   SentRuns       packed run, compared with the run sent last  ->  frame in the ring
    engine         ReceivedRuns   frame in the slot, applied to the run received last  ->  the whole run as packed

An engine attests the transfer of each bucket that it holds. If the base differs, full runs are sent: after a restart, a
failed transfer, or a missed bucket. Engines verify the whole tensors afterwards, as for every publication.
"""

from __future__ import annotations

import torch

from slimx.errors import SlimxError
from slimx.extras.direct.ends import frames
from slimx.extras.direct.ends.agent import LinkError
from slimx.extras.direct.ends.offer import HEADER, NO_BASE, PackedRun, room_of


class SentRuns:
    """Bytes that a trainer rank last sent each engine, by bucket and target, in host memory."""

    def __init__(self, item: int):
        """Creates an empty store. `item`: bytes of an element."""
        self.item = item
        self._runs: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """(bucket, target) -> transfer and its bytes."""

    def write(
        self, bucket: int, target: int, fresh: torch.Tensor, out: torch.Tensor, *, transfer: int, base: int
    ) -> int:
        """Writes header and frame of the run `fresh`, uint8 [bytes], to `out`, uint8 [room], and stores the run as that
        of `transfer`. Returns the bytes to send.

        `base`: transfer whose bytes the engine attests to hold; the run is sent in full unless they are stored here."""
        last_transfer, run = self._runs.get((bucket, target), (NO_BASE, None))
        if run is None:
            run = torch.empty(len(fresh), dtype=torch.uint8)
        if last_transfer != base:
            base = NO_BASE
        header = out[: HEADER.itemsize]
        frame = out[HEADER.itemsize :]
        length = frames.encode(None if base == NO_BASE else run, fresh, frame, item=self.item)
        header.numpy().view(HEADER)[0] = (base, length)
        # As the engine will do, so that both have the same bytes.
        frames.apply(frame[:length], run, item=self.item)
        self._runs[bucket, target] = transfer, run
        return HEADER.itemsize + length


class ReceivedRuns:
    """Bytes that an engine last received, by bucket and run, in host memory."""

    def __init__(self, item: int, buckets: int):
        self.item = item
        self.bases = [NO_BASE] * buckets
        """Bucket -> the transfer of which all runs are stored."""
        self._runs: dict[PackedRun, torch.Tensor] = {}

    def run(self, run: PackedRun) -> torch.Tensor:
        """Returns the bytes of a run, uint8 [bytes], always in the same memory."""
        if run not in self._runs:
            self._runs[run] = torch.zeros(run.nbytes, dtype=torch.uint8)
        return self._runs[run]

    def take(self, engine: str, bucket: int, transfer: int, runs: list[PackedRun], slot: torch.Tensor) -> None:
        """Applies the frames of all `runs` of `bucket` in `slot`, uint8 [bytes].

        Raises LinkError naming the trainer rank whose frame is invalid or does not match the bytes stored here."""
        base = self.bases[bucket]
        self.bases[bucket] = NO_BASE
        for run in runs:
            received = slot[run.offset : run.offset + room_of(run.nbytes, self.item)]
            # Copied, because the sender could still change the slot.
            frame_base, length = received[: HEADER.itemsize].clone().numpy().view(HEADER)[0].tolist()
            rank = f"trainer rank {run.source}"
            if frame_base not in (NO_BASE, base):
                raise LinkError(
                    f"{engine} has bucket {bucket} of transfer {base}, but {rank} sent changes to transfer "
                    f"{frame_base}; the next publication sends full weights",
                    code="direct.base",
                    about=rank,
                )
            frame = received[HEADER.itemsize :]
            if not 0 <= length <= frames.room(run.nbytes):
                raise _broken(engine, bucket, rank, f"{length} bytes, but at most {frames.room(run.nbytes)} fit")
            try:
                frames.apply(frame[:length], self.run(run), item=self.item)
            except SlimxError as error:
                raise _broken(engine, bucket, rank, str(error)) from None
        self.bases[bucket] = transfer


def _broken(engine: str, bucket: int, rank: str, reason: str) -> LinkError:
    return LinkError(
        f"{engine} cannot receive bucket {bucket} from {rank}: {reason}; run the same slimx on every machine",
        code="direct.frame",
        about=rank,
    )
