"""Storage of a policy's adapters on one engine rank: a slot in the buffers of SGLang's LoRA memory pool.

Written for sglang 0.5.23 (`srt/lora/mem_pool.py`). If SGLang fuses modules (query, key and value; gate and up), their
matrices A are concatenated, and the rows of B are those of the fused weight. Ranks split B like the weight's rows, and
A like its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from slimx.adapters.sglang.weights.layout import (
    ServedParameter,
    ServedPiece,
    Split,
    Unexpected,
    columns_split,
    gate_up,
    place,
    qkv,
    row_of,
    whole,
)
from slimx.adapters.sglang.weights.places import BASE, Layout
from slimx.errors import SlimxError
from slimx.extras.lora.targets import peft_name
from slimx.layout.maps import Rect
from slimx.layout.parts import matrix

FUSED: tuple[Split, ...] = (qkv, gate_up)
"""Layout functions of the weights that SGLang fuses from several modules; each of these modules has its own matrix
A."""


class AdaptedLayer(NamedTuple):
    """Layer with an adapter, and the part of SGLang's buffers that contains the slot's adapter for this layer."""

    name: str
    """Name of the layer's module in the model."""
    base: nn.Module
    a: torch.Tensor
    """Matrix A of this rank, [rank x fused modules, in]."""
    b: torch.Tensor
    """Matrix B of this rank, [out, rank]."""


class AdapterSlot:
    """Slot for one policy's adapters in SGLang's buffers, into which publications write them."""

    def __init__(self, manager: Any, slot: int):
        """Wraps the slot with index `slot`. `manager`: SGLang's LoRAManager, whose buffers never move in memory."""
        self._manager = manager
        self._slot = slot
        self.shares: dict[str, int] | None = None
        """Name of a tensor that the last publication copied into the slot -> number of its elements that this rank's
        slot should contain; None before the first publication."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the matrices A and B of every layer, keyed by the buffer names that `place` uses."""
        buffers: dict[str, torch.Tensor] = {}
        for layer in self._layers():
            buffers |= {_buffer(layer, "A"): layer.a, _buffer(layer, "B"): layer.b}
        return buffers

    def place(self, layout: Layout) -> None:
        """Records in `layout` where each of PEFT's tensors is in the buffers. A layer for which slimx has no layout is
        recorded as uncovered, with the reason."""
        for layer in self._layers():
            try:
                self._place(layout, layer)
            except (Unexpected, AttributeError, SlimxError) as error:
                layout.uncovered[layer.name] = str(error)

    def write(self, layout: Layout, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies published tensors, given as names and values, to the locations that `layout` records."""
        buffers = self.buffers()
        for name, tensor in named:
            flat = tensor.view(matrix(tensor.shape))
            for stored in layout.places[name].parts:
                for rect, view in zip(stored.rects, stored.views(buffers) or (), strict=True):
                    view.copy_(flat[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols])

    def _layers(self) -> Iterator[AdaptedLayer]:
        from sglang.srt.lora.utils import get_target_module_name

        pool = self._manager.memory_pool
        for index, modules in enumerate(self._manager.lora_modules):
            for name, module in modules.items():
                target = get_target_module_name(name, pool.target_modules)
                a = pool.A_buffer[target][index][self._slot]
                b = pool.B_buffer[target][index][self._slot]
                yield AdaptedLayer(name, getattr(module, BASE), a, b)

    def _place(self, layout: Layout, layer: AdaptedLayer) -> None:
        split, groups = row_of(f"{layer.name}.weight")
        parameter = ServedParameter(layer.b, layer.base, layer.base, None, self._manager.base_model)
        if split in FUSED:
            b = [*split(parameter)]
            rank = len(layer.a) // len(b)
            size = rank, layer.a.shape[1]
            a = []
            for index, piece in enumerate(b):
                a.append(replace(piece, shape=size, rects=(Rect(0, 0, 0, *size, index * rank, 0),)))
        elif split is columns_split:
            a = [*split(replace(parameter, parameter=layer.a))]
            b = [*whole(parameter)]
        else:
            raise Unexpected("slimx cannot publish adapters of this kind of layer")
        weight = f"{layer.name}.weight"
        place(layout, _buffer(layer, "A"), layer.a, [_named(piece, weight, groups, "A") for piece in a])
        place(layout, _buffer(layer, "B"), layer.b, [_named(piece, weight, groups, "B") for piece in b])


def _named(piece: ServedPiece, weight: str, groups: dict[str, str], letter: Literal["A", "B"]) -> ServedPiece:
    if piece.tensor is None:
        raise Unexpected("padding has no adapters")
    return replace(piece, tensor=peft_name(piece.tensor.format(name=weight, **groups), letter))


def _buffer(layer: AdaptedLayer, letter: str) -> str:
    return f"{layer.name}.lora_{letter}"
