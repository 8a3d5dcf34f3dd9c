"""A layer of multi-token prediction (MTP) that can be recomputed over packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's layer, but for full recomputation: 0.16.1 saves every argument for the backward pass as a tensor,
    which the bounds of packed sequences are not."""

    def _checkpointed_forward(self, forward_func: Callable[..., torch.Tensor], **inputs: Any) -> torch.Tensor:
        if self.config.recompute_method == "block":
            return forward_func(**inputs)  # as upstream: only uniform recomputation covers these layers
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        others = {name: value for name, value in inputs.items() if name not in tensors}

        def run(*values: torch.Tensor) -> torch.Tensor:
            return forward_func(**dict(zip(tensors, values, strict=True)), **others)

        return checkpoint(run, self.config.distribute_saved_activations, *tensors.values())


def with_prediction_layers(block: MultiTokenPredictionBlockSubmodules | None) -> Any:
    """The block's specification with every layer built as a PredictionLayer; None (no such layers here) stays None."""
    for layer in block.layer_specs if block is not None else ():
        layer.module = PredictionLayer
    return block
