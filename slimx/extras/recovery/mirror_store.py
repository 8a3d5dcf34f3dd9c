"""The process that keeps the mirrored states of ranks in its memory, on another machine than theirs if there is one.

    begin, write ..., finish    a rank sends the bytes of one step; they are whole if their digest is the rank's
    commit                      the driver has heard that the states of all ranks are whole: older ones are dropped
    read ...                    a new rank takes them back

At most two steps are held: the one that was committed last, and the one that comes in.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np
import xxhash

from slimx.errors import SlimxError

CHUNK = 16 * 2**20
"""Bytes that travel at once."""


class MirrorLost(SlimxError):
    """A mirrored state cannot be had: the process that kept it is gone, or what it has is not what was sent."""


@dataclass
class Mirrored:
    """The state of one rank after one step."""

    data: np.ndarray
    """uint8 [size]."""
    written: int = 0
    """Bytes that have come, in their order."""
    digest: str | None = None
    """XXH3 of 128 bits once all bytes have come and were found to be the rank's."""


class MirrorStore:
    """A Ray actor beside the ranks of its machine; it outlives them."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], Mirrored] = {}
        """By step and rank."""
        self.committed: int | None = None

    def ready(self, log_path: str) -> None:
        """Answers once the process has started; what it prints goes to `log_path`."""
        with open(log_path, "ab", buffering=0) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())

    def begin(self, step: int, rank: int, size: int) -> None:
        """Make room for the `size` bytes of `rank` after `step`. What else came in of this rank, and was not committed,
        is dropped."""
        for other in [key for key in self.held if key[1] == rank and key[0] != self.committed]:
            del self.held[other]
        self.held[step, rank] = Mirrored(np.empty(size, np.uint8))

    def write(self, step: int, rank: int, data: np.ndarray) -> None:
        """Take the bytes that follow."""
        mirrored = self.held[step, rank]
        mirrored.data[mirrored.written : mirrored.written + len(data)] = data
        mirrored.written += len(data)

    def finish(self, step: int, rank: int, digest: str) -> None:
        """Compare what has come with the `digest` of the sender. Raises MirrorLost if it is something else."""
        mirrored = self.held[step, rank]
        found = xxhash.xxh3_128_hexdigest(mirrored.data)
        if mirrored.written != len(mirrored.data) or found != digest:
            del self.held[step, rank]
            raise MirrorLost(
                f"of the state of trainer rank {rank} after step {step} {mirrored.written} of {len(mirrored.data)} "
                f"bytes have come, with the digest {found} instead of {digest}; it is not kept",
                code="mirror.differs",
                about=f"trainer rank {rank}",
            )
        mirrored.digest = digest

    def whole(self, step: int) -> list[int]:
        """Ranks whose state after `step` is whole."""
        return sorted(rank for (of, rank), mirrored in self.held.items() if of == step and mirrored.digest)

    def commit(self, step: int) -> None:
        """Hold what is of `step`, and nothing else."""
        self.held = {key: mirrored for key, mirrored in self.held.items() if key[0] == step}
        self.committed = step

    def describe(self, step: int, rank: int) -> tuple[int, str]:
        """Size and digest of a committed state. Raises MirrorLost if it is not here."""
        mirrored = self.held.get((step, rank)) if step == self.committed else None
        if mirrored is None or mirrored.digest is None:
            raise MirrorLost(
                f"the state of trainer rank {rank} after step {step} is not mirrored here",
                code="mirror.absent",
                about=f"trainer rank {rank}",
            )
        return len(mirrored.data), mirrored.digest

    def read(self, step: int, rank: int, start: int) -> np.ndarray:
        """`CHUNK` bytes from `start`, fewer at the end."""
        return self.held[step, rank].data[start : start + CHUNK]
