"""Process that stores the mirrored states of ranks in its memory, on a different node from the ranks if there is one.

    begin, write ..., finish    a rank sends the bytes of one step; they are complete if their digest is the rank's
    commit                      the driver has found the states of all ranks complete, and older ones are dropped
    read ...                    a new rank reads the bytes back

At most two steps are stored: the last committed one, and the one that is being received.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np
import xxhash

from slimx.errors import SlimxError

CHUNK = 16 * 2**20
"""Maximum number of state bytes in one message."""


class MirrorLost(SlimxError):
    """Raised if a mirrored state is not available, because the process that stored it is lost or the bytes differ from
    those sent."""


@dataclass
class Mirrored:
    """Mirrored state of one rank after a certain step."""

    data: np.ndarray
    """uint8 [size]: the bytes of the state, complete once `digest` is set."""
    written: int = 0
    """Number of bytes of `data` received so far, from its start."""
    digest: str | None = None
    """128-bit XXH3 of the bytes; set when all bytes have been received and match the digest that the rank sent."""


class MirrorStore:
    """Ray actor that stores the mirrored states of ranks and outlives these ranks, which run on another node if there
    are several nodes."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], Mirrored] = {}
        """States, by step and rank."""
        self.committed: int | None = None

    def ready(self, log_path: str) -> None:
        """Redirects the output of this process to `log_path`. The call returns once the process has started."""
        with open(log_path, "ab", buffering=0) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())

    def begin(self, step: int, rank: int, size: int) -> None:
        """Allocates `size` bytes for the state of `rank` after `step`. Other uncommitted states of this rank are
        dropped."""
        for other in [key for key in self.states if key[1] == rank and key[0] != self.committed]:
            del self.states[other]
        self.states[step, rank] = Mirrored(np.empty(size, np.uint8))

    def write(self, step: int, rank: int, data: np.ndarray) -> None:
        """Appends `data` to the state of `rank` after `step`."""
        mirrored = self.states[step, rank]
        mirrored.data[mirrored.written : mirrored.written + len(data)] = data
        mirrored.written += len(data)

    def finish(self, step: int, rank: int, digest: str) -> None:
        """Marks the state of `rank` after `step` as complete. Raises MirrorLost if its bytes do not match the sender's
        `digest`."""
        mirrored = self.states[step, rank]
        received = xxhash.xxh3_128_hexdigest(mirrored.data)
        if mirrored.written != len(mirrored.data) or received != digest:
            del self.states[step, rank]
            raise MirrorLost(
                f"the mirror store dropped the state of trainer rank {rank} after step {step}, because the store "
                f"received {mirrored.written} of {len(mirrored.data)} bytes, with digest {received} instead of "
                f"{digest}; check the network and host memory for errors",
                code="mirror.differs",
                about=f"trainer rank {rank}",
            )
        mirrored.digest = digest

    def complete(self, step: int) -> list[int]:
        """Returns the ranks whose states after `step` are complete."""
        return sorted(rank for (key, rank), mirrored in self.states.items() if key == step and mirrored.digest)

    def commit(self, step: int) -> None:
        """Marks the states of `step` as the valid ones, and drops all others."""
        self.states = {key: mirrored for key, mirrored in self.states.items() if key[0] == step}
        self.committed = step

    def describe(self, step: int, rank: int) -> tuple[int, str]:
        """Returns the size in bytes and the digest of a committed state. Raises MirrorLost if the state is not in this
        store."""
        mirrored = self.states.get((step, rank)) if step == self.committed else None
        if mirrored is None or mirrored.digest is None:
            raise MirrorLost(
                f"the mirror store does not contain the state of trainer rank {rank} after step {step}; run the same "
                "command again to resume from the newest checkpoint",
                code="mirror.absent",
                about=f"trainer rank {rank}",
            )
        return len(mirrored.data), mirrored.digest

    def read(self, step: int, rank: int, start: int) -> np.ndarray:
        """Returns `CHUNK` bytes of the state of `rank` after `step`, from byte `start` on; fewer at the end of the
        state."""
        return self.states[step, rank].data[start : start + CHUNK]
