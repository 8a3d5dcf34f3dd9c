"""Block-fp8 weights in an SGLang server in exact mode: stored as published, and dequantized for each use.

Written for sglang 0.5.23, whose fp8 layers on the CPU repack weights for AMX kernels that no wheel contains. Here codes
and scales stay as SGLang allocates and loads them. Publications write them in place, verification reads the same bytes,
and layers compute with the dequantized values.
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
    """Exact mode's replacements for functions of SGLang's fp8 layers, installed through SGLang's HookRegistry."""

    def __init__(self, linear: Callable[..., torch.Tensor]):
        """Stores `linear`, the function (quantization method, layer, input, bias) -> output that replaces the matrix
        product of fp8 linear layers."""
        self._linear = linear

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Returns the replacement functions, by dotted name of the SGLang function that each replaces."""
        loaded = {LINEAR_LOADED: self.keep, EXPERTS_LOADED: self.keep}
        return {LINEAR: self._linear, EXPERTS: self.experts, **loaded}

    def used(self, model: torch.nn.Module) -> set[str]:
        """Returns the dotted names of those functions replaced by exact mode that `model` calls."""
        targets = set()
        methods = methods_of(model)
        if "Fp8LinearMethod" in methods:
            targets |= {LINEAR, LINEAR_LOADED}
        if "Fp8MoEMethod" in methods:
            targets |= {EXPERTS, EXPERTS_LOADED}
        return targets

    def experts(self, method: Any, layer: Any, dispatch_output: Any) -> Any:
        """Computes the output of a layer's experts by calling SGLang's CPU function for unquantized experts, which
        exact mode has replaced with its own."""
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        inputs = dispatch_output.hidden_states, dispatch_output.topk_output, method.moe_runner_config
        return StandardCombineInput(hidden_states=fused_moe_native.moe_forward_native(layer, *inputs))

    def keep(self, method: Any, layer: Any) -> None:
        """Does nothing, so that weights keep the order in which they were loaded; SGLang's function would repack
        them."""


def methods_of(model: torch.nn.Module) -> set[str]:
    """Returns the class names of the quantization methods (`quant_method`) of `model`'s layers."""
    return {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}


def quantized_otherwise(module: Any) -> str | None:
    """Returns the reason, worded for an error message, why exact mode does not support the weights of a linear layer or
    of experts; None if exact mode supports them.

    It supports unquantized weights, and e4m3 codes with one fp32 scale per block in host memory.
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
    return "has weights in a quantization other than block fp8 on the CPU"


def weight_of(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight of a linear layer, [rows, cols]: an fp8 weight dequantized to `dtype`, any other weight
    unchanged."""
    weight = layer.weight
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    return _dequantized(layer, weight, layer.weight_scale_inv, dtype)


def expert_weights(layer: Any, name: str, counts: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the weight `name`, such as w13_weight, of each expert in a layer, [rows, cols].

    `counts`: number of tokens of each expert. fp8 codes are dequantized to `dtype`, but only for experts with tokens;
    the entries of other experts are uninitialized and must not be read.
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
