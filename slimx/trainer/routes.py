"""Which experts the trainer's router chose, compared with the engine's choice for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from slimx.data.batch import MicroBatch


class RouteRecorder:
    """Records the routing maps of this rank's MoE layers during a forward pass, micro-batch by micro-batch."""

    def __init__(self, chunks: Sequence[torch.nn.Module], tensor_group: dist.ProcessGroup):
        self._tensor_group = tensor_group
        self._maps: list[list[torch.Tensor]] = []
        self._recording = False
        layers = [
            (layer.layer_number - 1, layer.mlp.router)
            for chunk in chunks
            for layer in chunk.decoder.layers
            if isinstance(getattr(layer.mlp, "router", None), TopKRouter)
        ]
        self.layers = [number for number, _ in layers]
        """Global numbers, from 0, of the MoE layers that this rank holds."""
        for index, (_, router) in enumerate(layers):
            router.register_forward_hook(self._hook(index))
            self._maps.append([])

    def _hook(self, index: int) -> Any:
        def record(module: Any, inputs: Any, output: Any) -> None:
            if self._recording:
                self._maps[index].append(output[1].detach())

        return record

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record during the block; what was recorded before is forgotten."""
        for maps in self._maps:
            maps.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def differing(self, batches: list[MicroBatch]) -> torch.Tensor:
        """bool [sum of T]: positions at which any local layer chose another set of experts than the engine."""
        out = []
        for number, batch in enumerate(batches):
            differs = torch.zeros(len(batch.tokens), dtype=torch.bool)
            if batch.routed_experts is not None:
                engine = torch.from_numpy(batch.routed_experts.astype("int64"))
                for index, layer in enumerate(self.layers):
                    chosen = self._whole(self._maps[index][number]).cpu()
                    wanted = torch.zeros_like(chosen).scatter_(1, engine[:, layer], True)
                    differs |= (chosen != wanted).any(1)
            out.append(differs)
        return torch.cat(out)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """The routing map of all tokens: under sequence parallelism each TP rank routes its own slice."""
        size = self._tensor_group.size()
        if size == 1:
            return part
        parts = [torch.empty_like(part, dtype=torch.uint8) for _ in range(size)]
        dist.all_gather(parts, part.to(torch.uint8).contiguous(), group=self._tensor_group)
        return torch.cat(parts).bool()


def within_sequence(differs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """bool [T]: whether the position or an earlier one of the same sequence differs (attention carries it forward)."""
    return torch.cat([part.cummax(0).values for part in differs.to(torch.uint8).split(lengths)]).bool()
