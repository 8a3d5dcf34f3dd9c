"""A bucket of weights in memory, as the publisher describes it to receivers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from slimx.json_types import Json
from slimx.reshard.manifest import Encoding

ON_DEVICE = "cuda-ipc:"
"""Prefix of the path of GPU memory (`slimx.reshard.transports.device`)."""

PUBLISHER = 0
"""The trainer rank whose memory holds buckets if not every rank can open every other's memory."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a packed bucket."""

    name: str
    """Hugging Face name, or the engine's parameter name in rank-local buckets."""
    dtype: str
    """"float32", "bfloat16", "float8_e4m3fn", "uint8"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""
    nbytes: int
    checksum: int
    """64 bits (`slimx.reshard.kernels.cpu.checksum_tensor`)."""

    def to_json(self) -> Json:
        """Returns a JSON object with the checksum as 16 hex digits, because JSON numbers lose bits beyond 2^53."""
        return asdict(self) | {"shape": list(self.shape), "checksum": f"{self.checksum:016x}"}


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket in memory: one region per target, either consecutive or in separate memories."""

    path: str
    """/proc/PID/fd/N, readable by processes of the same user on the same machine; or memory of a GPU (`on_device`)."""
    size: int
    """Bytes of each memory."""
    targets: tuple[tuple[PackedTensor, ...], ...]
    """Tensors of each target: one target for Hugging Face names (every rank of every engine loads them all), one per
    engine rank for rank-local buckets."""
    others: tuple[str, ...] = ()
    """Paths of further memories, in the order of the engine ranks that open them: one per further rank, or copies on
    the other machines of a multi-node engine. Empty: every rank opens `path`."""
    chain: tuple[Any, ...] = ()
    """Files, of a class of the transport, from which its receiver at an engine builds the bucket; empty: `path` has
    it."""

    @property
    def on_device(self) -> bool:
        """True if it is in GPU memory. Engines copy such a bucket when they stage it, and map others."""
        return self.path.startswith(ON_DEVICE)

    @property
    def tensors(self) -> tuple[PackedTensor, ...]:
        """All tensors of all targets."""
        return tuple(chain.from_iterable(self.targets))

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def parts(self, encoding: Encoding, ranks: int) -> Json:
        """Returns the bucket as JSON by rank of an engine of `ranks`, or for "all": the path on the rank's machine and
        the tensors that the rank loads."""
        paths = (self.path, *self.others)
        if encoding != "local" and len(paths) == 1:
            return {"all": self._part(self.path, self.targets[0])}
        targets = self.targets if encoding == "local" else self.targets * ranks
        parts = {}
        for rank, tensors in enumerate(targets):
            # Ranks that open the same memory are consecutive.
            path = paths[rank * len(paths) // len(targets)]
            parts[str(rank)] = self._part(path, tensors)
        return parts

    def _part(self, path: str, tensors: tuple[PackedTensor, ...]) -> Json:
        return {"fd_path": path, "size": self.size, "tensors": [tensor.to_json() for tensor in tensors]}
