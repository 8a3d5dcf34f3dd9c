"""The policy's adapters as one engine rank holds them: a slot in the buffers of SGLang's memory pool.

Written for sglang 0.5.23 (`srt/lora/mem_pool.py`). The A of modules that SGLang fuses (query, key and value; gate and
up) stand one below the other, and rows of B as those of the fused weight. Ranks split B where they split the weight's
rows, A where they split its columns.
"""

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
"""Rows of weights that SGLang makes of several modules, each with an A of its own."""


class AdaptedLayer(NamedTuple):
    """A layer with an adapter."""

    name: str
    """Name of the module in the model."""
    base: nn.Module
    a: torch.Tensor
    """[rank x fused modules, in] of this rank."""
    b: torch.Tensor
    """[out, rank] of this rank."""


class AdapterSlot:
    """The slot of one policy, whose adapters have as many rows as the slot has."""

    def __init__(self, manager: Any, slot: int):
        """`manager`: SGLang's LoRAManager, whose buffers stay where they are."""
        self._manager, self._slot = manager, slot
        self.shares: dict[str, int] | None = None
        """Tensors that the publication which came here last has copied, and the share of each that the slot should
        hold; None before the first."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """A and B of every layer by the names under which `place` notes them."""
        held: dict[str, torch.Tensor] = {}
        for layer in self._layers():
            held |= {_buffer(layer, "A"): layer.a, _buffer(layer, "B"): layer.b}
        return held

    def place(self, layout: Layout) -> None:
        """Note where PEFT's tensors are in the buffers; a layer that no row explains is uncovered."""
        for layer in self._layers():
            try:
                self._place(layout, layer)
            except (Unexpected, AttributeError, SlimxError) as error:
                layout.uncovered[layer.name] = str(error)

    def write(self, layout: Layout, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy published tensors into their places."""
        buffers = self.buffers()
        for name, tensor in named:
            flat = tensor.view(matrix(tensor.shape))
            for held in layout.places[name].parts:
                for rect, view in zip(held.rects, held.views(buffers) or (), strict=True):
                    view.copy_(flat[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols])

    def _layers(self) -> Iterator[AdaptedLayer]:
        from sglang.srt.lora.utils import get_target_module_name

        pool = self._manager.memory_pool
        for number, modules in enumerate(self._manager.lora_modules):
            for name, module in modules.items():
                target = get_target_module_name(name, pool.target_modules)
                a, b = (buffer[target][number][self._slot] for buffer in (pool.A_buffer, pool.B_buffer))
                yield AdaptedLayer(name, getattr(module, BASE), a, b)

    def _place(self, layout: Layout, layer: AdaptedLayer) -> None:
        split, groups = row_of(f"{layer.name}.weight")
        at = ServedParameter(layer.b, layer.base, layer.base, None)
        if split in FUSED:
            b = [*split(at)]
            size = rank, cols = len(layer.a) // len(b), layer.a.shape[1]
            a = [replace(p, shape=size, rects=(Rect(0, 0, 0, *size, k * rank, 0),)) for k, p in enumerate(b)]
        elif split is columns_split:
            a, b = [*split(replace(at, parameter=layer.a))], [*whole(at)]
        else:
            raise Unexpected("adapters of such layers were never published")
        for letter, held, pieces in (("A", layer.a, a), ("B", layer.b, b)):
            named = [_named(piece, f"{layer.name}.weight", groups, letter) for piece in pieces]
            place(layout, _buffer(layer, letter), held, named)


def _named(piece: ServedPiece, weight: str, groups: dict[str, str], letter: Literal["A", "B"]) -> ServedPiece:
    return replace(piece, tensor=peft_name(piece.tensor.format(name=weight, **groups), letter))


def _buffer(layer: AdaptedLayer, letter: str) -> str:
    return f"{layer.name}.lora_{letter}"
