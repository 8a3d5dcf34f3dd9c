"""A bucket of weights in shared memory, as the publisher describes it and a receiver finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a packed bucket."""

    name: str
    """Hugging Face name."""
    dtype: str
    """"float32", "bfloat16", ..."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""
    nbytes: int
    checksum: int
    """64 bits, `slimx.reshard.kernel.checksum_tensor`."""

    def to_json(self) -> dict[str, Any]:
        """The checksum as 16 hex digits: JSON numbers lose bits beyond 2^53."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "offset": self.offset,
            "nbytes": self.nbytes,
            "checksum": f"{self.checksum:016x}",
        }


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket in the publisher's memory."""

    path: str
    """/proc/PID/fd/N: readable by processes of the same user on the same machine."""
    size: int
    """Bytes."""
    tensors: tuple[PackedTensor, ...]
