"""A bucket of weights in memory, as the publisher describes it and receivers find it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slimx.reshard.manifest import Encoding

ON_DEVICE = "cuda-ipc:"
"""Prefix of the path of memory on a GPU (`slimx.reshard.transports.device`)."""

PUBLISHER = 0
"""The trainer rank whose memory buckets are in where not every rank can open every other's."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a packed bucket."""

    name: str
    """Hugging Face name, or the engine's own for rank-local buckets."""
    dtype: str
    """"float32", "bfloat16", "float8_e4m3fn", "uint8"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""
    nbytes: int
    checksum: int
    """64 bits, `slimx.reshard.kernels.cpu.checksum_tensor`."""

    def to_json(self) -> dict[str, Any]:
        """The checksum as 16 hex digits: JSON numbers lose bits beyond 2^53."""
        return asdict(self) | {"shape": list(self.shape), "checksum": f"{self.checksum:016x}"}


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket in memory: one region per target, one after another, or each in memory of its own."""

    path: str
    """/proc/PID/fd/N: readable by processes of the same user on the same machine. Or memory of a GPU, `on_device`."""
    size: int
    """Bytes of each memory."""
    targets: tuple[tuple[PackedTensor, ...], ...]
    """Per target its tensors: one target for Hugging Face names (every rank of every engine takes them all), one per
    engine rank for rank-local buckets."""
    others: tuple[str, ...] = ()
    """Paths of further memories, in the order of the engine ranks that open them: each other rank's own, or copies on
    the other machines of an engine that spans several. Empty: every rank opens `path`."""
    chain: tuple[Any, ...] = ()
    """Pieces of which a transport's end at an engine makes the bucket first; empty: `path` has it."""

    @property
    def on_device(self) -> bool:
        """True if it is in the memory of a GPU. An engine copies such a bucket when it stages it, and maps others."""
        return self.path.startswith(ON_DEVICE)

    @property
    def tensors(self) -> tuple[PackedTensor, ...]:
        """All tensors of all targets."""
        return tuple(tensor for target in self.targets for tensor in target)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def parts(self, encoding: Encoding, ranks: int) -> dict[str, Any]:
        """The bucket as JSON for each rank of an engine of `ranks`, by its number, or for "all": where the rank's
        machine has it, and which tensors the rank takes."""
        paths = (self.path, *self.others)
        if encoding != "local" and len(paths) == 1:
            return {"all": self._part(self.path, self.targets[0])}
        targets = self.targets if encoding == "local" else self.targets * ranks
        # The ranks that open the same memory follow one another.
        return {
            str(rank): self._part(paths[rank * len(paths) // len(targets)], tensors)
            for rank, tensors in enumerate(targets)
        }

    def _part(self, path: str, tensors: tuple[PackedTensor, ...]) -> dict[str, Any]:
        return {"fd_path": path, "size": self.size, "tensors": [tensor.to_json() for tensor in tensors]}
