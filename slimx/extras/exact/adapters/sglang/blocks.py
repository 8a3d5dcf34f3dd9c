"""Block-fp8 weights of an SGLang server in exact mode: stored as published, dequantized when used.

Written for sglang 0.5.23, whose fp8 layers on the CPU repack weights for AMX kernels that no wheel contains. Here the
codes and scales stay as SGLang allocates and loads them: a publication writes in place, a verification reads the same
bytes, and a linear computes with the dequantized values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slimx.extras.low_precision.blocks import dequantize

_MODULE = "sglang.srt.layers.quantization.fp8"
LINEAR = f"{_MODULE}.Fp8LinearMethod.apply"
EXPERTS = f"{_MODULE}.Fp8MoEMethod.apply"
LINEAR_LOADED = f"{_MODULE}.Fp8LinearMethod.process_weights_after_loading"
EXPERTS_LOADED = f"{_MODULE}.Fp8MoEMethod.process_weights_after_loading"


class BlockOperations:
    """Replacements for SGLang's fp8 layers in its HookRegistry."""

    def __init__(self, linear: Callable[..., torch.Tensor]):
        """Takes `linear`, the replacement for a linear layer: (method, layer, input, bias) -> output."""
        self._linear = linear

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Returns the replacements by target."""
        loaded = {LINEAR_LOADED: self.keep, EXPERTS_LOADED: self.keep}
        return {LINEAR: self._linear, EXPERTS: self.experts, **loaded}

    def used(self, model: torch.nn.Module) -> set[str]:
        """Returns the targets that `model` calls."""
        targets = set()
        methods = methods_of(model)
        if "Fp8LinearMethod" in methods:
            targets |= {LINEAR, LINEAR_LOADED}
        if "Fp8MoEMethod" in methods:
            targets |= {EXPERTS, EXPERTS_LOADED}
        return targets

    def experts(self, method: Any, layer: Any, dispatch_output: Any) -> Any:
        """Calls SGLang's function for unquantized experts on the CPU, which exact mode replaces."""
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        inputs = dispatch_output.hidden_states, dispatch_output.topk_output, method.moe_runner_config
        return StandardCombineInput(hidden_states=fused_moe_native.moe_forward_native(layer, *inputs))

    def keep(self, method: Any, layer: Any) -> None:
        """Does nothing, so that weights keep their loaded order: SGLang would repack them."""


def methods_of(model: torch.nn.Module) -> set[str]:
    """Returns the class names of the quantization methods of `model`'s layers."""
    return {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}


def quantized_otherwise(module: Any) -> str | None:
    """Returns the reason why the weights of a linear layer or of experts are not supported, else None.

    Unquantized weights are supported, and e4m3 codes with one fp32 scale per block in host memory.
    """
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

    method = module.quant_method
    if isinstance(method, (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)):
        return None
    weights = {name: weight for name, weight in module.named_parameters(recurse=False) if "weight" in name}
    forms = {(name.endswith("_scale_inv"), weight.dtype, weight.device.type) for name, weight in weights.items()}
    covered = {(False, torch.float8_e4m3fn, "cpu"), (True, torch.float32, "cpu")}
    if isinstance(method, (Fp8LinearMethod, Fp8MoEMethod)) and method.block_quant and forms == covered:
        return None
    return "has weights that are quantized in another way than in blocks of fp8 on the CPU"


def weight_of(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight of a linear layer [rows, cols], dequantized to `dtype` if the layer stores codes."""
    weight = layer.weight
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    return _dequantized(layer, weight, layer.weight_scale_inv, dtype)


def expert_weights(layer: Any, name: str, counts: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the weights `name` of all experts of a layer, each [rows, cols].

    If the layer stores codes, only experts with tokens (`counts`) are dequantized to `dtype`; the other entries are
    uninitialized and must not be read.
    """
    weights = getattr(layer, name)
    if weights.dtype != torch.float8_e4m3fn:
        return list(weights)
    used = torch.tensor([expert for expert, count in enumerate(counts) if count], dtype=torch.long)  # perhaps none
    wide = _dequantized(layer, weights[used], getattr(layer, name + "_scale_inv")[used], dtype)
    out = [torch.empty(weights.shape[1:], dtype=dtype)] * len(weights)
    for expert, matrix in zip(used.tolist(), wide, strict=True):
        out[expert] = matrix
    return out


def _dequantized(layer: Any, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(codes, scales, tuple(layer.quant_method.weight_block_size), dtype)
