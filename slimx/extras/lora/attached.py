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
    """Buffer for the merged weights of one bucket at a time; it is as large as the largest bucket requires."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Tensors,
        merging: Mapping[str, Callable[[], torch.Tensor]],
    ):
        """Prepares to merge weights of trainer rank `rank` before the rank packs its `parameters` as `plan` specifies.

        `merging`: name of an adapted parameter -> function that returns the merged weight, which is packed instead of
        the parameter."""
        self._parameters = parameters
        self._merging = merging
        self._plan = plan
        self._rank = rank
        self._places: dict[int, dict[str, torch.Tensor]] = {}
        self.nbytes = merging_buffer_bytes(plan, merging.__contains__).get(rank, 0) if merging else 0
        """Size of the buffer in bytes. The buffer is allocated for the first bucket, because many runs never export."""

    @cached_property
    def _memory(self) -> torch.Tensor:
        device = next((p.device for p in self._parameters.values()), None)
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def places(self, bucket: int) -> dict[str, torch.Tensor]:
        """Returns, by parameter name, the buffers into which `make` writes for `bucket`. Every call returns the same
        memory."""
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
        """Computes the merged weights that `moves` read, and overwrites the previous bucket's. `moves`: some of the
        plan's copies into `bucket`."""
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
    """Weight form of a trainer rank with frozen weights and adapters; determines whether the rank publishes and exports
    merged weights or the matrices A and B."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, adapters: Mapping[str, Adapter], *, alone: bool):
        """Stores `adapters`, weight name -> adapter. `alone`: True if engines receive only the matrices A and B, not
        merged weights (`publish.adapters`)."""
        self.adapters = adapters
        self._alone = alone
        self.merging = {name: adapter.merged for name, adapter in adapters.items()}
        """Weight name -> function that returns the merged weight, for publications and exports."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        parameters = {}
        for adapter in self.adapters.values():
            for letter, parameter in zip("AB", adapter.parameters, strict=True):
                parameters[f"matrix {letter} of the adapter of {adapter.sources}"] = parameter
        return parameters

    def leaving(self, name: str, plan: Plan, rank: int, weights: Tensors) -> tuple[Tensors, DerivedTensors]:
        """Returns the tensors that `rank` packs as specified by `plan`: either the weights, into which adapters are
        merged before packing, or the unmerged weights together with A and B, named as in
        `slimx.extras.lora.targets.adapter_parts`.

        `name`: purpose of the plan ("publish", "adapters" or "export"); adapters are always merged for an export."""
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
