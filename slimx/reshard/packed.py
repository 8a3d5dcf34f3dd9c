"""Description of a packed bucket, which the publisher sends to engines so that they can open its memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from slimx.json_types import Json
from slimx.reshard.manifest import Encoding

ON_DEVICE = "cuda-ipc:"
"""Prefix of the path of a bucket in GPU memory (`slimx.reshard.transports.device`)."""

PUBLISHER = 0
"""Index of the trainer rank that publishes. Its memory contains all buckets, unless all ranks can open each other's
memory; buckets are then distributed over the memory of several ranks."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Location and checksum of one tensor of a packed bucket."""

    name: str
    """Hugging Face name; in rank-local buckets, name of the engine's parameter."""
    dtype: str
    """Dtype of the tensor: "float32", "bfloat16", "float8_e4m3fn" or "uint8"."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte from the start of the bucket."""
    nbytes: int
    checksum: int
    """64-bit checksum of the tensor's bytes (`slimx.reshard.kernels.cpu.checksum_tensor`)."""

    def to_json(self) -> Json:
        """Returns the fields as JSON. The checksum becomes a string of 16 hex digits, because JSON numbers lose bits
        beyond 2^53."""
        return asdict(self) | {"shape": list(self.shape), "checksum": f"{self.checksum:016x}"}


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """Packed bucket: its tensors, and the paths of the memory that contains them.

    The bucket has one region per target. The regions are consecutive in a single allocation, or each is a separate
    allocation with its own path."""

    path: str
    """Path of the bucket's memory; the first path if there are several (`others`).

    One of: /proc/PID/fd/N (host memory, which processes of the same user can open on the same machine), the path of a
    file, or the name of GPU memory (`on_device`)."""
    size: int
    """Size in bytes of the memory at each of the bucket's paths."""
    targets: tuple[tuple[PackedTensor, ...], ...]
    """Tensors by target.

    Buckets with Hugging Face names have a single target, because all ranks of all engines load the same tensors;
    rank-local buckets have one target per engine rank."""
    others: tuple[str, ...] = ()
    """Paths of the bucket's memory after the first path, in the order of the engine ranks that open them.

    They lead to the regions of further ranks, or to copies of the bucket on the other machines of a multi-node engine.
    Empty if every rank opens `path`."""
    chain: tuple[Any, ...] = ()
    """Descriptions of the files from which the transport's receiver on an engine assembles the bucket; their class is
    defined by the transport. Empty if `path` contains the bucket."""

    @property
    def on_device(self) -> bool:
        """True if the bucket is in GPU memory. Engines copy such a bucket when they stage it; a bucket in host memory
        is mapped instead."""
        return self.path.startswith(ON_DEVICE)

    @property
    def tensors(self) -> tuple[PackedTensor, ...]:
        """Tensors of all targets, in the order of the targets."""
        return tuple(chain.from_iterable(self.targets))

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors, padding excluded."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def parts(self, encoding: Encoding, ranks: int) -> Json:
        """Returns JSON that maps the index of each rank of an engine to the path that the rank opens on its machine and
        the tensors that it loads. If these are the same for all ranks, the only key is "all".

        `ranks`: number of ranks of the engine."""
        paths = (self.path, *self.others)
        if encoding != "local" and len(paths) == 1:
            return {"all": self._part(self.path, self.targets[0])}
        targets = self.targets if encoding == "local" else self.targets * ranks
        parts = {}
        for rank, tensors in enumerate(targets):
            # Consecutive ranks open the same memory if there are fewer memories than ranks.
            path = paths[rank * len(paths) // len(targets)]
            parts[str(rank)] = self._part(path, tensors)
        return parts

    def _part(self, path: str, tensors: tuple[PackedTensor, ...]) -> Json:
        return {"fd_path": path, "size": self.size, "tensors": [tensor.to_json() for tensor in tensors]}
