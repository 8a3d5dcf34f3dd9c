"""A stand-in for the trainers of a publication: weights in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import ray

from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from tests.integration.conftest import Bucket, Weights, perturbed

BUCKETS = 3


class Neighbour:
    """An actor on this machine, as a rank is."""

    def ping(self) -> None:
        """Answers, as a rank does, who asks whether it has died."""


class Trainers:
    """A stand-in for the trainers: weights in this process, other ones for every version."""

    def __init__(self, weights: Weights):
        self.start, self.version = weights, 0
        self.actors = [ray.remote(Neighbour).options(num_cpus=0).remote()]
        self.at_bucket: Callable[[int], None] = lambda bucket: None
        """Called before a bucket is packed: by then the engines have done with the bucket before the last one."""
        self.renamed: dict[str, str] = {}
        self._open: dict[int, Bucket] = {}

    def weights(self, version: int) -> Weights:
        return perturbed(self.start, seed=version)

    async def begin(self, manifest: Manifest) -> None: ...

    async def forms(self) -> list[dict[str, str]]:
        return [{name: f"float32:{','.join(map(str, tensor.shape))}" for name, tensor in self.start.items()}]

    async def bucket_count(self) -> int:
        return BUCKETS

    async def gather(self, bucket: int) -> PackedBucket:
        self.at_bucket(bucket)
        weights = self.weights(self.version)
        self._open[bucket] = made = Bucket({name: weights[name] for name in list(weights)[bucket::BUCKETS]})
        tensors = tuple(replace(t, name=self.renamed.get(t.name, t.name)) for t in made.tensors)
        return replace(made.packed, targets=(tensors,))

    async def release(self, bucket: int | None = None) -> None:
        for number in [bucket] if bucket is not None else list(self._open):
            os.close(self._open.pop(number).fd)
