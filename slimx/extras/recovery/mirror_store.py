"""The process that keeps the mirrored states of ranks in its memory, on another node than theirs if there is one.

    begin, write ..., finish    a rank sends the bytes of one step; they are complete if their digest is the rank's
    commit                      the driver has found the states of all ranks complete: older ones are dropped
    read ...                    a new rank reads them back

At most two steps are stored: the last committed one, and the incoming one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np
import xxhash

from slimx.errors import SlimxError

CHUNK = 16 * 2**20
"""Bytes per message."""


class MirrorLost(SlimxError):
    """A mirrored state is not available: its process is gone, or its bytes differ from the sent ones."""


@dataclass
class Mirrored:
    """The state of one rank after one step."""

    data: np.ndarray
    """uint8 [size]."""
    written: int = 0
    """Bytes received, in order."""
    digest: str | None = None
    """128-bit XXH3, set once all bytes were received and match the rank's digest."""


class MirrorStore:
    """A Ray actor on the ranks' nodes, which outlives the ranks."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], Mirrored] = {}
        """States by step and rank."""
        self.committed: int | None = None

    def ready(self, log_path: str) -> None:
        """Returns once the process has started; its output goes to `log_path`."""
        with open(log_path, "ab", buffering=0) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())

    def begin(self, step: int, rank: int, size: int) -> None:
        """Allocates the `size` bytes of `rank` after `step`. Drops other uncommitted states of this rank."""
        for other in [key for key in self.states if key[1] == rank and key[0] != self.committed]:
            del self.states[other]
        self.states[step, rank] = Mirrored(np.empty(size, np.uint8))

    def write(self, step: int, rank: int, data: np.ndarray) -> None:
        """Appends the next bytes."""
        mirrored = self.states[step, rank]
        mirrored.data[mirrored.written : mirrored.written + len(data)] = data
        mirrored.written += len(data)

    def finish(self, step: int, rank: int, digest: str) -> None:
        """Compares the received bytes with the sender's `digest`. Raises MirrorLost if they differ."""
        mirrored = self.states[step, rank]
        received = xxhash.xxh3_128_hexdigest(mirrored.data)
        if mirrored.written != len(mirrored.data) or received != digest:
            del self.states[step, rank]
            raise MirrorLost(
                f"the store received {mirrored.written} of {len(mirrored.data)} bytes of the state of trainer rank "
                f"{rank} after step {step}, with digest {received} instead of {digest}; the state is dropped",
                code="mirror.differs",
                about=f"trainer rank {rank}",
            )
        mirrored.digest = digest

    def complete(self, step: int) -> list[int]:
        """Returns the ranks whose state after `step` is complete."""
        return sorted(rank for (key, rank), mirrored in self.states.items() if key == step and mirrored.digest)

    def commit(self, step: int) -> None:
        """Drops all states except those of `step`."""
        self.states = {key: mirrored for key, mirrored in self.states.items() if key[0] == step}
        self.committed = step

    def describe(self, step: int, rank: int) -> tuple[int, str]:
        """Returns size and digest of a committed state. Raises MirrorLost if it is not stored."""
        mirrored = self.states.get((step, rank)) if step == self.committed else None
        if mirrored is None or mirrored.digest is None:
            raise MirrorLost(
                f"the state of trainer rank {rank} after step {step} is not mirrored in this store",
                code="mirror.absent",
                about=f"trainer rank {rank}",
            )
        return len(mirrored.data), mirrored.digest

    def read(self, step: int, rank: int, start: int) -> np.ndarray:
        """Returns `CHUNK` bytes from `start`, fewer at the end."""
        return self.states[step, rank].data[start : start + CHUNK]
