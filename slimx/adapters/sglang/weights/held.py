"""Proves what one rank's model holds, and makes the tensors that it computes from published ones.

Written for sglang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from slimx.adapters.sglang.weights.places import BASE, Destination, Parameters, held_sums


def derive(model: nn.Module) -> None:
    """Do what SGLang does after loads that pass `load_weights` by: make MLA's w_kc and w_vc.

    `load_weights` does it by itself (model_loader.loader.post_load_weights); process_weights_after_loading runs in
    /end_weight_update for both. Norms that are centred on zero (GemmaRMSNorm) keep 1 + weight beside the weight, which
    their weight loader makes.
    """
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def differing(places: dict[str, Destination], known: dict[str, int], parameters: Parameters) -> list[str]:
    """Those of `known`, tensors with their shares, of which `parameters` hold something else."""
    sums = held_sums(places, known, parameters)
    return [name for name, share in known.items() if sums[name] != {share}]


def derived(model: nn.Module, published: Iterable[torch.Tensor]) -> Iterator[str]:
    """Tensors that hang on modules beside `published`, all parameters, their views and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *published)}
    for name, module in model.named_modules():
        if hasattr(module, BASE):  # where SGLang notes the places of its modules' outputs
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
                yield f"{name}.{attribute}" if name else attribute
