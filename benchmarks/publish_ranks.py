"""The processes of benchmarks/publish.py: two trainer ranks and an engine rank, driven through pipes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import per_tensor
import torch
import torch.distributed as dist
from peer import DEADLINE_S
from publish_model import TRAINERS, Layer

from slimx.errors import SlimxError
from slimx.extras.planner.links.rehearsal import EngineRank
from slimx.reshard.manifest import Encoding
from slimx.reshard.pack.gather import Gatherer
from slimx.reshard.pack.packer import Contribution, Packer
from slimx.reshard.packed import PackedTensor

ENCODINGS: tuple[Encoding, ...] = ("local", "hf")
ENGINE = TRAINERS
"""The engine's rank in the processes' gloo group."""


class _Groups:
    """The group of all processes, that of the trainers, and that of rank 0 and the engine."""

    def __init__(self, rank: int, init_method: str):
        # gloo would look up the host's name, which need not resolve; gloo's own variable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        limit = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=TRAINERS + 1, timeout=limit)
        self.trainers, self.engine = dist.new_group(list(range(TRAINERS))), dist.new_group([0, ENGINE])


class TrainerProcess:
    """One trainer rank, with slimx's packer and gatherer, and with the per-tensor method."""

    def __init__(self, rank: int, init_method: str, layer: Layer, bucket_bytes: int):
        self.rank, self.layer, self.groups = rank, layer, _Groups(rank, init_method)
        self.parameters = layer.parameters_of(rank)
        self.gatherers = {
            encoding: Gatherer(Packer(layer.plan(encoding, bucket_bytes), rank, self.parameters), remote=(), group=None)
            for encoding in ENCODINGS
        }

    def open(self, encoding: Encoding, bucket: int) -> str:
        return self.gatherers[encoding].open(bucket)[0]

    def fill(self, encoding: Encoding, bucket: int, path: str) -> Contribution:
        return self.gatherers[encoding].fill(bucket, [path])

    def release(self, encoding: Encoding, bucket: int | None) -> None:
        self.gatherers[encoding].release(bucket)

    def per_tensor(self) -> dict[str, float]:
        groups = self.groups
        return per_tensor.send(self.parameters, self.layer, self.rank, groups.trainers, groups.engine)


class EngineProcess:
    """The engine rank: one set of fused parameters for slimx, and one for the per-tensor method."""

    def __init__(self, rank: int, init_method: str, layer: Layer):
        self.layer, self.groups = layer, _Groups(rank, init_method)
        self.ours, self.theirs = layer.engine_parameters(), layer.engine_parameters()
        self.ranks = {"local": EngineRank(self.ours), "hf": EngineRank(layer.hf_places(self.ours))}
        self.places = layer.hf_places(self.theirs)

    def stage(self, encoding: Encoding, path: str, size: int, tensors: Sequence[PackedTensor]) -> tuple[float, float]:
        """Stages a bucket; returns the seconds for mapping and for verifying it."""
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
        return per_tensor.receive(self.places, self.layer, self.groups.engine)

    def wipe(self, ours: bool) -> None:
        """Replaces the weights, so that those of an earlier round cannot be taken for this round's."""
        for parameter in (self.ours if ours else self.theirs).values():
            parameter.view(torch.uint8).fill_(0xFF)

    def compare(self) -> None:
        """Checks that slimx and the per-tensor method have loaded the same bits, and that no overwritten value is
        left."""
        for name, ours in self.ours.items():
            if not torch.equal(ours.view(torch.int16), self.theirs[name].view(torch.int16)):
                raise SlimxError(f"{name} differs between slimx and the per-tensor method")
            if (ours.view(torch.int16) == -1).any():
                raise SlimxError(f"{name} was not loaded whole")
