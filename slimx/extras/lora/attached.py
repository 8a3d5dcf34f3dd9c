"""The adapters of one trainer rank: their parameters, and the tensors that the rank publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from slimx.extras.lora.merging_buffer import ALIGN, merging_buffer_bytes
from slimx.layout.form import AttachedForm, DerivedTensors, Tensors
from slimx.reshard.plan.copy_plan import Plan

if TYPE_CHECKING:
    from slimx.extras.lora.adapters.megatron import Adapter


class MergingBuffer(DerivedTensors):
    """Buffer for the merged weights of one bucket at a time, with the size that the largest bucket needs."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Tensors,
        merging: Mapping[str, Callable[[], torch.Tensor]],
    ):
        """Takes `plan`, by which `rank` reads `parameters`, and `merging`: by parameter name, the function that makes
        the tensor [as parameter] read instead."""
        self._parameters = parameters
        self._merging = merging
        self._plan = plan
        self._rank = rank
        self._places: dict[int, dict[str, torch.Tensor]] = {}
        self.nbytes = merging_buffer_bytes(plan, merging.__contains__).get(rank, 0) if merging else 0
        """Size of the buffer, in bytes. It is allocated for the first bucket: many runs never export."""

    @cached_property
    def _memory(self) -> torch.Tensor:
        device = next((p.device for p in self._parameters.values()), None)
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def places(self, bucket: int) -> dict[str, torch.Tensor]:
        """Returns by name the destination of each tensor that `make` writes for `bucket`; always the same memory."""
        if bucket not in self._places:
            places = {}
            start = 0
            for name in self._names(self._plan.moves_of(self._rank, bucket)):
                parameter = self._parameters[name]
                data = self._memory[start : start + parameter.nbytes]
                places[name] = data.view(parameter.dtype).view(parameter.shape)
                start += -(-parameter.nbytes // ALIGN) * ALIGN
            self._places[bucket] = places
        return self._places[bucket]

    @torch.no_grad()
    def make(self, bucket: int, moves: np.ndarray) -> None:
        """Writes the tensors that `moves` of `bucket` read, over those of the previous bucket."""
        places = self.places(bucket)
        for name in self._names(moves):
            places[name].copy_(self._merging[name]())

    def _names(self, moves: np.ndarray) -> list[str]:
        if not self._merging:
            return []
        names = []
        for index in np.unique(moves["parameter"]).tolist():
            name = self._plan.parameters[index].name
            if name in self._merging:
                names.append(name)
        return names


class AttachedAdapters(AttachedForm):
    """Adapters of a rank's weights."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, adapters: Mapping[str, Adapter], *, alone: bool):
        """Takes `adapters` by the names of their weights. `alone`: engines get them unmerged (`publish.adapters`)."""
        self.adapters = adapters
        self._alone = alone
        self.merging = {name: adapter.merged for name, adapter in adapters.items()}
        """By weight name, the function that makes the merged tensor for engines and exports."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        parameters = {}
        for adapter in self.adapters.values():
            for letter, parameter in zip("AB", adapter.parameters, strict=True):
                parameters[f"{letter} of the adapter of {adapter.sources}"] = parameter
        return parameters

    def leaving(self, name: str, plan: Plan, rank: int, weights: Tensors) -> tuple[Tensors, DerivedTensors]:
        """Returns weights to be merged, or weights plus A and B by the names of
        `slimx.extras.lora.targets.adapter_parts`."""
        if name == "export" or not self._alone:
            return weights, MergingBuffer(plan, rank, weights, self.merging)
        unmerged = dict(weights)
        for weight, adapter in self.adapters.items():
            path = weight.rpartition(".")[0]
            unmerged |= zip((f"{path}.lora_a", f"{path}.lora_b"), adapter.parameters, strict=True)
        return unmerged, DerivedTensors()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        for adapter in self.adapters.values():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self.adapters.values():
                adapter.enabled = True
