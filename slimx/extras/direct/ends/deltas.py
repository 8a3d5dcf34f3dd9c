"""Deltas on direct transfers (`publish.delta`): both ends keep what an engine was sent last, and its changes travel.

Each run of bytes (`offer.py`) travels as a header and a frame (`frames.py`):

    trainer rank   Sent     packed run, compared with the run sent last  ->  frame in the ring
    engine         Held     frame in the slot  ->  applied to the run held: the whole run as it was packed

An engine attests of which transfer it holds each bucket. Whatever has another base gets whole runs: after a restart, a
transfer that failed half-way, or a bucket that was missed. The whole tensors are proven afterwards, as ever.
"""

from __future__ import annotations

import torch

from slimx.errors import SlimxError
from slimx.extras.direct.ends import frames
from slimx.extras.direct.ends.agent import LinkError
from slimx.extras.direct.ends.offer import HEADER, NO_BASE, Run, room_of


class Sent:
    """The bytes that a trainer rank sent each engine last, by bucket and target, in host memory."""

    def __init__(self, item: int):
        """`item`: bytes of an element."""
        self.item = item
        self._runs: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """By bucket and target the transfer, and its bytes."""

    def write(
        self, bucket: int, target: int, fresh: torch.Tensor, place: torch.Tensor, *, transfer: int, base: int
    ) -> int:
        """Write header and frame of the run `fresh`, uint8 [bytes], into `place`, uint8 [room], and keep the run as
        that of `transfer`; bytes to send.

        `base`: the transfer whose bytes the engine holds, as it attests; the run goes whole unless they are kept here.
        """
        kept, run = self._runs.get((bucket, target), (NO_BASE, None))
        if run is None:
            run = torch.empty(len(fresh), dtype=torch.uint8)
        if kept != base:
            base = NO_BASE
        header, frame = place[: HEADER.itemsize], place[HEADER.itemsize :]
        length = frames.encode(None if base == NO_BASE else run, fresh, frame, item=self.item)
        header.numpy().view(HEADER)[0] = (base, length)
        # By what the engine will do, so that both hold the same.
        frames.apply(frame[:length], run, item=self.item)
        self._runs[bucket, target] = transfer, run
        return HEADER.itemsize + length


class Held:
    """The bytes that an engine was sent last, by bucket and run, in host memory."""

    def __init__(self, item: int, buckets: int):
        self.item = item
        self.bases = [NO_BASE] * buckets
        """By bucket the transfer of which all runs are held."""
        self._runs: dict[Run, torch.Tensor] = {}

    def run(self, run: Run) -> torch.Tensor:
        """The bytes of a run, uint8 [bytes], always in the same memory."""
        if run not in self._runs:
            self._runs[run] = torch.zeros(run.nbytes, dtype=torch.uint8)
        return self._runs[run]

    def take(self, engine: str, bucket: int, transfer: int, runs: list[Run], slot: torch.Tensor) -> None:
        """Apply the frames of all `runs` of `bucket`, which have come into `slot`, uint8 [bytes].

        Raises LinkError naming the trainer rank whose frame is none, or is made for other bytes than are held here.
        """
        base, self.bases[bucket] = self.bases[bucket], NO_BASE
        for run in runs:
            place = slot[run.offset : run.offset + room_of(run.nbytes, self.item)]
            # Taken once: who writes to the slot could change it.
            wanted, length = place[: HEADER.itemsize].clone().numpy().view(HEADER)[0].tolist()
            rank = f"trainer rank {run.source}"
            if wanted not in (NO_BASE, base):
                raise LinkError(
                    f"{engine} holds bucket {bucket} of transfer {base}, and {rank} sent changes of transfer {wanted}; "
                    "it gets whole weights with the next publication",
                    code="direct.base",
                    about=rank,
                )
            frame = place[HEADER.itemsize :]
            if not 0 <= length <= frames.room(run.nbytes):
                raise _broken(engine, bucket, rank, f"{length} bytes where {frames.room(run.nbytes)} have room")
            try:
                frames.apply(frame[:length], self.run(run), item=self.item)
            except SlimxError as error:
                raise _broken(engine, bucket, rank, str(error)) from None
        self.bases[bucket] = transfer


def _broken(engine: str, bucket: int, rank: str, why: str) -> LinkError:
    return LinkError(
        f"{engine} cannot take bucket {bucket} from {rank}: {why}; run the same slimx on every machine",
        code="direct.frame",
        about=rank,
    )
