"""Block-fp8 weights of an SGLang server in exact mode: held as published, widened where they are used.

Written for sglang 0.5.23, whose own fp8 layers on the CPU pack weights for AMX kernels that no wheel has, after an
assertion. Here the codes and scales stay as SGLang allocates and loads them, so that a publication writes its bytes in
place and a verification finds them there; a linear computes with what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slimx.extras.low_precision.blocks import dequantise

_MODULE = "sglang.srt.layers.quantization.fp8"
LINEAR = f"{_MODULE}.Fp8LinearMethod.apply"
EXPERTS = f"{_MODULE}.Fp8MoEMethod.apply"
LINEAR_LOADED = f"{_MODULE}.Fp8LinearMethod.process_weights_after_loading"
EXPERTS_LOADED = f"{_MODULE}.Fp8MoEMethod.process_weights_after_loading"


class BlockOperations:
    """Replacements for SGLang's fp8 layers in its HookRegistry."""

    def __init__(self, linear: Callable[..., torch.Tensor]):
        """`linear`: the replacement for a linear layer, of its method, itself, its input and its bias."""
        self._linear = linear

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """By target."""
        kept = {LINEAR_LOADED: self.keep, EXPERTS_LOADED: self.keep}
        return {LINEAR: self._linear, EXPERTS: self.experts, **kept}

    def used(self, model: torch.nn.Module) -> set[str]:
        """Targets that `model` calls."""
        targets = {"Fp8LinearMethod": (LINEAR, LINEAR_LOADED), "Fp8MoEMethod": (EXPERTS, EXPERTS_LOADED)}
        return {target for method in targets.keys() & methods_of(model) for target in targets[method]}

    def experts(self, method: Any, layer: Any, dispatch_output: Any) -> Any:
        """By SGLang's function for unquantised experts on the CPU, in whose place exact mode's operations are."""
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        given = dispatch_output.hidden_states, dispatch_output.topk_output, method.moe_runner_config
        return StandardCombineInput(hidden_states=fused_moe_native.moe_forward_native(layer, *given))

    def keep(self, method: Any, layer: Any) -> None:
        """Weights stay as they were loaded: SGLang would repack them."""


def methods_of(model: torch.nn.Module) -> set[str]:
    """Class names of SGLang's methods by which `model`'s layers compute."""
    return {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}


def quantised_otherwise(module: Any) -> str | None:
    """The reason against the weights of a linear layer or of experts; None for unquantised ones, and for e4m3 codes
    with one fp32 scale per block in host memory, with which is computed here."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

    method = module.quant_method
    if isinstance(method, (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)):
        return None
    weights = {name: held for name, held in module.named_parameters(recurse=False) if "weight" in name}
    forms = {(name.endswith("_scale_inv"), held.dtype, held.device.type) for name, held in weights.items()}
    covered = {(False, torch.float8_e4m3fn, "cpu"), (True, torch.float32, "cpu")}
    if isinstance(method, (Fp8LinearMethod, Fp8MoEMethod)) and method.block_quant and forms == covered:
        return None
    return "holds weights that are quantised in another way than in blocks of fp8 on the CPU"


def weight_of(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a linear layer [rows, cols], in `dtype` where the layer holds codes."""
    held = layer.weight
    return held if held.dtype != torch.float8_e4m3fn else _widened(layer, held, layer.weight_scale_inv, dtype)


def expert_weights(layer: Any, name: str, counts: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """The weights `name` of all experts of a layer, each [rows, cols], in `dtype` where the layer holds codes: then of
    those alone that have tokens (`counts`). What stands for the others is not to be read."""
    held = getattr(layer, name)
    if held.dtype != torch.float8_e4m3fn:
        return list(held)
    used = torch.tensor([number for number, count in enumerate(counts) if count])
    wide = _widened(layer, held[used], getattr(layer, name + "_scale_inv")[used], dtype)
    out = [torch.empty(held.shape[1:], dtype=dtype)] * len(held)
    for number, matrix in zip(used.tolist(), wide, strict=True):
        out[number] = matrix
    return out


def _widened(layer: Any, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantise(codes, scales, tuple(layer.quant_method.weight_block_size), dtype)
