"""The adapters of one trainer rank: what is trained, and what leaves the rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from slimx.extras.lora.room import MergingRoom
from slimx.layout.form import AttachedForm, Made, Tensors
from slimx.reshard.plan.copy_plan import Plan

if TYPE_CHECKING:
    import torch

    from slimx.extras.lora.adapters.megatron import Adapter


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
