"""Memory in which trainer ranks merge weights with their adapters before a bucket is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from slimx.layout.form import Made, Tensors
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.precision import ITEMSIZE

ALIGN = 64
"""Bytes: of each weight's start."""


def merged_room(plan: Plan, merges: Callable[[str], bool]) -> dict[int, int]:
    """Bytes by trainer rank that the bucket with most of them needs; `merges`: of a parameter's name, whether it is
    read merged."""
    sizes = np.array(
        [
            -(-ITEMSIZE[p.dtype] * int(np.prod(p.shape, dtype=np.int64)) // ALIGN) * ALIGN if merges(p.name) else 0
            for p in plan.parameters
        ],
        dtype=np.int64,
    )
    moved = plan.moved[sizes[plan.moved["parameter"]] > 0]
    read = np.unique(np.stack([moved[key].astype(np.int64) for key in ("source", "bucket", "parameter")]), axis=1)
    out: dict[int, int] = {}
    if not read.size:
        return out
    buckets, inverse = np.unique(read[:2], axis=1, return_inverse=True)
    room = np.bincount(inverse.ravel(), weights=sizes[read[2]])
    for rank, nbytes in zip(buckets[0].tolist(), room.tolist(), strict=True):
        out[rank] = max(out.get(rank, 0), int(nbytes))
    return out


class MergingRoom(Made):
    """Memory for the merged weights of one bucket at a time, as much as the bucket with most of them needs."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Tensors,
        merging: Mapping[str, Callable[[], torch.Tensor]],
    ):
        """`rank` reads `parameters` by `plan`. `merging`: by name of a parameter what makes the tensor [as parameter]
        that is read in its place."""
        self._parameters, self._merging, self._plan, self._rank = parameters, merging, plan, rank
        self._places: dict[int, dict[str, torch.Tensor]] = {}
        self.nbytes = merged_room(plan, merging.__contains__).get(rank, 0) if merging else 0
        """Bytes of the memory, which there is from the first bucket on: many runs never export."""

    @cached_property
    def _memory(self) -> torch.Tensor:
        device = next((p.device for p in self._parameters.values()), None)
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def places(self, bucket: int) -> dict[str, torch.Tensor]:
        """By name where `make` writes each that `bucket` reads; always the same memory."""
        if bucket not in self._places:
            names, ends = self._names(self._plan.moves_of(self._rank, bucket)), self._ends(bucket)
            self._places[bucket] = {
                name: self._memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
                for name, start in zip(names, ends, strict=False)
                for parameter in (self._parameters[name],)
            }
        return self._places[bucket]

    @torch.no_grad()
    def make(self, bucket: int, moves: np.ndarray) -> None:
        """Write what `moves` of `bucket` read, in the place of what another one did."""
        places = self.places(bucket)
        for name in self._names(moves):
            places[name].copy_(self._merging[name]())

    def _names(self, moves: np.ndarray) -> list[str]:
        if not self._merging:
            return []
        read = np.unique(moves["parameter"]).tolist()
        return [name for number in read if (name := self._plan.parameters[number].name) in self._merging]

    def _ends(self, bucket: int) -> list[int]:
        """Offsets at which the bucket's weights begin, and the end of the last."""
        names = self._names(self._plan.moves_of(self._rank, bucket))
        sizes = (-(-self._parameters[name].nbytes // ALIGN) * ALIGN for name in names)
        return list(accumulate(sizes, initial=0))
