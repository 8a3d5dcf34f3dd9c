"""The adapters of one trainer rank: what is trained, and what leaves the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from slimx.extras.lora.room import ALIGN, merged_room
from slimx.layout.form import AttachedForm, Made, Tensors
from slimx.reshard.plan.copy_plan import Plan

if TYPE_CHECKING:
    from slimx.extras.lora.adapters.megatron import Adapter


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
            places, start = {}, 0
            for name in self._names(self._plan.moves_of(self._rank, bucket)):
                parameter = self._parameters[name]
                own = self._memory[start : start + parameter.nbytes]
                places[name] = own.view(parameter.dtype).view(parameter.shape)
                start += -(-parameter.nbytes // ALIGN) * ALIGN
            self._places[bucket] = places
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


class AttachedAdapters(AttachedForm):
    """Adapters beside the weights of a rank."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, adapters: Mapping[str, Adapter], *, alone: bool):
        """`adapters`: by the name of the weight. `alone`: engines get them unmerged (`publish.adapters`)."""
        self.adapters, self._alone = adapters, alone
        self.merging = {name: adapter.merged for name, adapter in adapters.items()}
        """By name of a weight a function that makes the tensor which engines and exports get."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            f"{letter} of the adapter of {adapter.sources}": parameter
            for adapter in self.adapters.values()
            for letter, parameter in zip("AB", adapter.parameters, strict=True)
        }

    def leaving(self, name: str, plan: Plan, rank: int, weights: Tensors) -> tuple[Tensors, Made]:
        """Weights to be merged, or A and B beside them by the names of `slimx.extras.lora.targets.adapter_parts`."""
        if name == "export" or not self._alone:
            return weights, MergingRoom(plan, rank, weights, self.merging)
        unmerged = dict(weights)
        for weight, adapter in self.adapters.items():
            path = weight.rpartition(".")[0]
            unmerged |= zip((f"{path}.lora_a", f"{path}.lora_b"), adapter.parameters, strict=True)
        return unmerged, Made()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        for adapter in self.adapters.values():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self.adapters.values():
                adapter.enabled = True
