"""The processes of benchmarks/publish.py: two trainer ranks and an engine rank, driven through pipes."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import per_tensor
import torch
import torch.distributed as dist
from publish_model import TRAINERS, Split, engine_parameters, held_by, hf_places, plan_of

from slimx.errors import DeadlineError, SlimxError
from slimx.preflight.rehearsal import EngineRank
from slimx.reshard.gather import Gatherer
from slimx.reshard.manifest import Encoding
from slimx.reshard.packed import PackedTensor
from slimx.reshard.packer import Packer, Share

ENCODINGS: tuple[Encoding, ...] = ("local", "hf")
ENGINE = TRAINERS
"""The engine's rank in the processes' gloo group."""
DEADLINE_S = 120.0


class _Groups:
    """All processes meet; the trainers among themselves, and rank 0 with the engine."""

    def __init__(self, rank: int, init_method: str):
        # gloo would look up the host's name, which need not resolve; gloo's own variable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        limit = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=TRAINERS + 1, timeout=limit)
        self.trainers, self.engine = dist.new_group(list(range(TRAINERS))), dist.new_group([0, ENGINE])


class TrainerProcess:
    """One trainer rank: slimx's own packer and gatherer, and the per-tensor way."""

    def __init__(self, rank: int, init_method: str, split: Split, bucket_bytes: int):
        self.rank, self.split, self.groups = rank, split, _Groups(rank, init_method)
        self.parameters = held_by(split, rank)
        self.gatherers = {
            encoding: Gatherer(
                Packer(plan_of(split, encoding, bucket_bytes), rank, self.parameters), remote=(), group=None
            )
            for encoding in ENCODINGS
        }

    def open(self, encoding: Encoding, bucket: int) -> str:
        return self.gatherers[encoding].open(bucket)

    def fill(self, encoding: Encoding, bucket: int, path: str) -> Share:
        return self.gatherers[encoding].fill(bucket, path)

    def release(self, encoding: Encoding, bucket: int | None) -> None:
        self.gatherers[encoding].release(bucket)

    def per_tensor(self) -> dict[str, float]:
        groups = self.groups
        return per_tensor.send(self.parameters, self.split, self.rank, groups.trainers, groups.engine)


class EngineProcess:
    """The engine rank: one set of fused parameters for slimx, one for the per-tensor way."""

    def __init__(self, rank: int, init_method: str, split: Split):
        self.split, self.groups = split, _Groups(rank, init_method)
        self.ours, self.theirs = engine_parameters(), engine_parameters()
        self.ranks = {"local": EngineRank(self.ours), "hf": EngineRank(hf_places(self.ours))}
        self.places = hf_places(self.theirs)

    def stage(self, encoding: Encoding, path: str, size: int, tensors: Sequence[PackedTensor]) -> tuple[float, float]:
        """Seconds to map the bucket and to prove it."""
        began = time.perf_counter()
        proof = self.ranks[encoding].stage(path, size, tensors)
        return time.perf_counter() - began - proof, proof

    def load(self, encoding: Encoding) -> None:
        self.ranks[encoding].load()

    def verify(self, encoding: Encoding) -> int:
        return self.ranks[encoding].verify()

    def drop(self, encoding: Encoding) -> None:
        self.ranks[encoding].drop()

    def per_tensor(self) -> dict[str, float]:
        return per_tensor.receive(self.places, self.split, self.groups.engine)

    def wipe(self, ours: bool) -> None:
        """What an earlier round loaded must not pass for this round's."""
        for parameter in (self.ours if ours else self.theirs).values():
            parameter.view(torch.uint8).fill_(0xFF)

    def compare(self) -> None:
        """slimx and the per-tensor way must have loaded the same bits, and none of the wiped ones."""
        for name, ours in self.ours.items():
            if not torch.equal(ours.view(torch.int16), self.theirs[name].view(torch.int16)):
                raise SlimxError(f"{name} differs between slimx's way and the per-tensor way")
            if (ours.view(torch.int16) == -1).any():
                raise SlimxError(f"{name} was not loaded whole")


class Peer:
    """One process as the driver sees it."""

    def __init__(self, kind: type, *arguments: Any):
        context = mp.get_context("spawn")
        self.name = f"{kind.__name__} {arguments[0]}"
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the process has built what it holds."""
        self._answer("start")

    def call(self, method: str, *arguments: Any) -> Any:
        """Its method's result; whatever it raised."""
        self._pipe.send((method, arguments))
        return self._answer(method)

    def stop(self) -> None:
        self._pipe.close()  # the process ends by itself
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()

    def _answer(self, what: str) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise DeadlineError(what, DEADLINE_S, self.name)
        try:
            result = self._pipe.recv()
        except EOFError:
            raise SlimxError(f"{self.name} ended during {what}; its message stands above") from None
        if isinstance(result, BaseException):
            raise result
        return result


def _serve(pipe: Connection, kind: type, arguments: tuple[Any, ...]) -> None:
    """The process's main loop, until the driver closes the pipe."""
    served = kind(*arguments)
    pipe.send(None)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(served, method)(*given))
        except Exception as error:
            pipe.send(error)
