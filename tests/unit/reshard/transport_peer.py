"""A process that stands for one engine rank: it opens buckets and proves their bytes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.memory import open_memory
from tests.refusals import refusal_fields

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def check(packed: PackedBucket, target: int, memory: torch.Tensor) -> int:
    """Counts the tensors of a target, which must be as announced. Raises SlimxError for the first that is not."""
    for tensor in packed.targets[target]:
        stored = memory[tensor.offset : tensor.offset + tensor.nbytes].clone().view(getattr(torch, tensor.dtype))
        if checksum_tensor(stored.view(tensor.shape)) != tensor.checksum:
            raise SlimxError(f"tensor {tensor.name} has another checksum", code="peer.checksum", about=tensor.name)
    return len(packed.targets[target])


class Peer:
    """The parent's side: `ask` runs one of `Rank`'s methods in the process. A refusal answers its code and object."""

    def __init__(self, kind: type | None = None) -> None:
        """Starts the peer. `kind`: the class of what answers, `Rank` by default."""
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(other, kind or Rank), daemon=True)
        self.process.start()
        other.close()

    def tell(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def answer(self, seconds: float = 120) -> Any:
        assert self.pipe.poll(seconds), "the peer did not answer"
        return self.pipe.recv()

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()


class Rank:
    def ready(self) -> str:
        return "ready"

    def map(self, packed: PackedBucket, target: int) -> int:
        return check(packed, target, open_memory(packed.path, packed.size))


def _serve(pipe: Connection, kind: type) -> None:
    rank = kind()
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send(getattr(rank, method)(*arguments))
        except SlimxError as error:
            pipe.send(refusal_fields(error)[:2])
