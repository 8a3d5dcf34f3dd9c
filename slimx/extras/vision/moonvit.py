"""Vision tower of Kimi-K2.5 and its projector, made of transformers' modules."""

from __future__ import annotations

from typing import Any, cast, override

import torch
from torch import nn
from torch.nn import functional
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config


class KimiTower(kimi.Kimi_K25PreTrainedModel):
    """Vision tower and projector. One parameter contains queries, keys and values, as in checkpoints."""

    def __init__(self, config: Kimi_K25Config):
        super().__init__(config)
        self.vision_tower = kimi.Kimi_K25VisionModel._from_config(config.vision_config)
        for layer in self.vision_tower.layers:
            fuse(layer.attn)
        self.mm_projector = kimi.Kimi_K25MultimodalProjection(config)

    @override
    def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        """Returns the outputs of the tower, with embeddings [N, h] of all images. `pixel_values`: patches [P, 3, p, p];
        `grid_thw`: numbers of patches of each image along time, height and width, int [n, 3]."""
        seen = self.vision_tower(pixel_values, grid_thw=grid_thw)
        seen.pooler_output = self.mm_projector(seen.pooler_output).flatten(0, 1)
        return seen


def fuse(attention: Any) -> None:
    """Replaces the three projections of transformers' attention module `attention` by one, `qkv`."""
    attention.qkv = Projections(attention.dim, attention.num_heads)
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(attention, name, _Projection(attention.qkv, index))


class Projections(nn.Module):
    """Linear layer of queries, keys and values in the order of checkpoints, in which the two coordinates of each rotary
    pair are adjacent (x0 y0 x1 y1 ...); its outputs have halves instead (x0 x1 ... y0 y1 ...), as transformers rotates
    them."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * size, size))
        self.bias = nn.Parameter(torch.empty(3 * size))
        self._heads = heads

    @override
    def forward(self, states: torch.Tensor, index: int) -> torch.Tensor:
        """Returns the queries (`index` 0), keys (1) or values (2) of `states` [P, size]."""
        weight, bias = (tensor.chunk(3)[index] for tensor in (self.weight, self.bias))
        if index < 2:  # values are not rotated
            weight, bias = self._halves(weight), self._halves(bias)
        return functional.linear(states, weight, bias)

    def _halves(self, tensor: torch.Tensor) -> torch.Tensor:
        pairs = tensor.unflatten(0, (self._heads, -1, 2))
        return pairs.transpose(1, 2).flatten(0, 2)


class _Projection(nn.Module):
    """One of the projections of a `Projections`, whose parameters it does not own."""

    def __init__(self, projections: Projections, index: int):
        super().__init__()
        self._all = (projections,)
        self._index = index

    @override
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self._all[0](states, self._index))
