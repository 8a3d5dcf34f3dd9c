"""Transformer Engine's real Python without a GPU: its compiled half, which needs one, is computed in plain torch.

megatron-core then builds real objects of Transformer Engine: classes, constructors, parameters, their marks and
checkpoint keys. Every call of a class or function whose kernels are replaced here is bound to its real signature
first, so that an argument that the installed version does not know fails as it would on a GPU.

`install()` changes the whole process, before the trainer's adapters, which then find what they find on a GPU.
"""

from __future__ import annotations

import enum
import functools
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from slimx.extras.cpu.adapters import megatron as megatron_cpu
from slimx.extras.low_precision import products
from slimx.extras.low_precision.recipes import RECIPES
from slimx.numerics.attention import packed_attention
from slimx.numerics.norm import rms_norm, zero_centered_rms_norm

PACKAGE = Path(sys.prefix) / "transformer-engine"
"""Where `make venv` puts the package's Python, outside what an interpreter of the environment imports."""
COMPILED = "transformer_engine_torch"
UNUSED = ("onnx", "onnx.defs", "onnx_ir", "onnxscript", "onnxscript.rewriter")
"""Packages that Transformer Engine imports and that nothing here calls."""


class CompiledNames(type):
    """Gives a compiled enumeration whatever member its users name, a number each."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, cls(len(vars(cls))))
        return getattr(cls, name)


class CompiledHalf(types.ModuleType):
    """The extension module: it has every name, and computes those that `kernels` defines."""

    DType = enum.IntEnum(
        "DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", start=0
    )
    NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8", start=-1
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, CompiledNames(name, (int,), {"__module__": COMPILED}))
        return vars(self)[name]


def install(*, fp32_scales: bool = True) -> None:
    """Imports Transformer Engine with kernels of plain torch, and lets trainers choose its layers as on a GPU.
    `fp32_scales`: sets the variable that a rank with trainer.fp8 has; nothing else reads it."""
    if fp32_scales:
        os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    megatron_cpu.install()
    _import(CompiledHalf(COMPILED))
    megatron_cpu.install_megatron()
    # Asked by the constructors of its modules.
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    from transformer_engine.pytorch import quantization

    quantization._FP8_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = (True, "")
    _compute_modules()
    _compute_functions()
    from slimx.trainer import trainer  # once megatron-core finds the layers

    choose = trainer.choose_backends
    trainer.choose_backends = lambda section, **options: choose(section, **options | {"device": "cuda"})


def _import(compiled: CompiledHalf) -> None:
    for name in UNUSED:
        module = MagicMock(name=name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module
    padding = (fused_multi_row_padding, fused_multi_row_unpadding)
    for kernel in (multi_tensor_adam, multi_tensor_l2norm, multi_tensor_scale, *padding):
        setattr(compiled, kernel.__name__, kernel)
    sys.modules[COMPILED] = compiled
    sys.path.append(str(PACKAGE))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own way to be imported before it is compiled
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch  # noqa: F401


def bound(original: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Calls that `original` would take, answered by `compute`, which is given every argument by its name there."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = signature.bind(*args, **kwargs)
        inputs.apply_defaults()
        return compute(**inputs.arguments)

    return call


def _compute_modules() -> None:
    import transformer_engine.pytorch as te

    te.Linear.forward = bound(te.Linear.forward, _linear)
    te.LayerNormLinear.forward = bound(te.LayerNormLinear.forward, _norm_linear)
    te.GroupedLinear.forward = bound(te.GroupedLinear.forward, _grouped_linear)
    te.RMSNorm.forward = bound(te.RMSNorm.forward, _norm)
    te.LayerNorm.forward = bound(te.LayerNorm.forward, _layer_norm)
    te.DotProductAttention.forward = bound(te.DotProductAttention.forward, _attention)


def _compute_functions() -> None:
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.transformer.moe import moe_utils

    extension.general_gemm = bound(extension.general_gemm, _gemm)
    extension.apply_rotary_pos_emb = bound(extension.apply_rotary_pos_emb, _rotate)
    for name, compute in (
        ("fused_permute", _permute),
        ("fused_permute_with_probs", _permute_with_probs),
        ("fused_unpermute", _unpermute),
        ("fused_sort_chunks_by_index", _sort_chunks),
        ("fused_sort_chunks_by_index_with_probs", _sort_chunks_with_probs),
    ):
        setattr(moe_utils, name, bound(getattr(extension, name), compute))


def _linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None, **_: Any) -> Any:
    return _product(self, inp, is_first_microbatch)


def _norm_linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None, **_: Any) -> Any:
    assert self.normalization == "RMSNorm"
    assert not self.return_layernorm_output
    normed = _normed(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
    return _product(self, normed, is_first_microbatch)


def _product(module: Any, x: torch.Tensor, first: bool | None) -> Any:
    """Computes x W^T + b with the exchanges of tensor parallelism before and after."""
    from megatron.core.tensor_parallel import mappings

    group, cut = module.tp_group, module.sequence_parallel
    if module.parallel_mode == "column":
        enter = mappings.gather_from_sequence_parallel_region if cut else mappings.copy_to_tensor_model_parallel_region
        x = enter(x, group=group)
    out = _multiplied(module, "weight", x, first)
    if module.parallel_mode == "row":
        leave = mappings.reduce_scatter_to_sequence_parallel_region
        out = (leave if cut else mappings.reduce_from_tensor_model_parallel_region)(out, group=group)
    bias = module.bias if module.use_bias else None
    if module.return_bias:
        return out, bias
    return out if bias is None else out + bias


def _multiplied(module: Any, name: str, x: torch.Tensor, first: bool | None) -> torch.Tensor:
    """Computes x W^T with the module's parameter `name`, in fp8 where the caller's context says so.

    The weights' copies from one micro-batch to the next lie where Transformer Engine has them; one that is used and is
    not of the present weights fails."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    weight = getattr(module, name)
    if not FP8GlobalStateManager.is_fp8_enabled():
        return F.linear(x, weight)
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    assert_dim_for_fp8_exec(x, weight)
    if recipe.float8_block_scaling():
        assert not recipe.fp8_quant_fwd_weight.power_2_scale
    if first is not None:
        copies = module._fp8_workspaces
        if first or name not in copies:
            copies[name] = weight.detach().clone()
        assert torch.equal(copies[name], weight), f"a copy of {name} is not of the present weights"
    return products.linear(x, weight, RECIPES["blockwise" if recipe.float8_block_scaling() else "mxfp8"])


def _norm(self: Any, input: torch.Tensor, **_: Any) -> torch.Tensor:
    return _normed(input, self.weight, self.eps, self.zero_centered_gamma)


def _layer_norm(self: Any, input: torch.Tensor, **_: Any) -> torch.Tensor:
    assert not self.zero_centered_gamma
    return F.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    return (zero_centered_rms_norm if zero_centered else rms_norm)(x, weight, eps)


def _grouped_linear(
    self: Any, inp: torch.Tensor, m_splits: Sequence[int] | torch.Tensor, is_first_microbatch: bool | None, **_: Any
) -> Any:
    parts = inp.split([int(rows) for rows in m_splits])
    outs = [_multiplied(self, f"weight{number}", x, is_first_microbatch) for number, x in enumerate(parts)]
    biases = [getattr(self, f"bias{number}") if self.use_bias else None for number in range(len(parts))]
    if self.return_bias:
        return torch.cat(outs), biases
    return torch.cat([out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)])


def _attention(
    self: Any,
    query_layer: torch.Tensor,
    key_layer: torch.Tensor,
    value_layer: torch.Tensor,
    qkv_format: str,
    cu_seqlens_q: torch.Tensor,
    attn_mask_type: str,
    window_size: tuple[int, int] | None,
    **_: Any,
) -> torch.Tensor:
    """Computes causal attention of packed sequences: queries [T, heads, d]; returns [T, heads * d of values]."""
    assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
    assert (window_size or self.window_size)[0] == -1
    lengths = cu_seqlens_q.diff().tolist()
    return packed_attention(query_layer, key_layer, value_layer, lengths, self.softmax_scale)


def _gemm(
    A: torch.Tensor,  # noqa: N803 (their names)
    B: torch.Tensor,  # noqa: N803
    layout: str,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    grad: bool,
    **_: Any,
) -> tuple[torch.Tensor, None, None, None]:
    """Multiplies in cuBLAS' order, by columns: TN is B A^T, NN is B A, NT is B^T A."""
    left, right = B.T if layout[1] == "T" else B, A.T if layout[0] == "T" else A
    product = left.to(out_dtype) @ right.to(out_dtype)
    if bias is not None:
        assert not grad
        product = product + bias.to(out_dtype)
    return product, None, None, None


def _rotate(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str,
    cu_seqlens: torch.Tensor,
    interleaved: bool,
    fused: bool,
    cp_size: int,
    **_: Any,
) -> torch.Tensor:
    """Rotates the first elements of heads [T, heads, d] by `freqs` [longest, 1, 1, rotated]; sequences begin at 0."""
    assert fused
    assert (tensor_format, cp_size) == ("thd", 1)
    places = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
    angles = freqs[places, 0]
    turning, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], dim=-1)
    if interleaved:
        even, odd = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return torch.cat([(turning * angles.cos() + turned * angles.sin()).to(t.dtype), rest], dim=-1)


def _permute(inp: torch.Tensor, routing_map: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows by expert, and the token of each row: [rows]."""
    tokens = routing_map.bool().T.nonzero()[:, 1]
    return inp[tokens], tokens


def _permute_with_probs(inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, **_: Any) -> Any:
    rows, tokens = _permute(inp, routing_map)
    return rows, probs.T[routing_map.bool().T], tokens


def _unpermute(
    inp: torch.Tensor, row_id_map: torch.Tensor, merging_probs: torch.Tensor | None, restore_shape: Any, **_: Any
) -> torch.Tensor:
    assert merging_probs is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def _sort_chunks(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[number] for number in sorted_index.tolist()])


def _sort_chunks_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _sort_chunks(inp, split_sizes, sorted_index), _sort_chunks(probs, split_sizes, sorted_index)


def fused_multi_row_padding(
    source: torch.Tensor, out: torch.Tensor, rows: Sequence[int], padded: Sequence[int]
) -> None:
    """Runs of `rows` rows become runs of `padded` rows, zeros at their ends."""
    runs = zip(source.split(list(rows)), out.split(list(padded)), strict=True)
    for run, place in runs:
        place.zero_()[: len(run)] = run


def fused_multi_row_unpadding(
    source: torch.Tensor, out: torch.Tensor, padded: Sequence[int], rows: Sequence[int]
) -> None:
    runs = zip(source.split(list(padded)), out.split(list(rows)), strict=True)
    for run, place in runs:
        place.copy_(run[: len(place)])


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Applies AdamW (Loshchilov and Hutter, 1711.05101) to lists of gradients, parameters and both moments, which are
    read into fp32 and rounded when they are written, as `adam.cu` does."""
    assert mode == bias_correction == 1
    for gradient, parameter, *moments in zip(*tensor_lists, strict=True):
        assert parameter.dtype == gradient.dtype == torch.float32
        mean, square = (moment.float() for moment in moments)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for moment, value in zip(moments, (mean, square), strict=True):
            moment.copy_(value)
        root = (square / (1 - beta2**step)).sqrt() + epsilon
        parameter.sub_(lr * (mean / (1 - beta1**step) / root + weight_decay * parameter))


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of all tensors together, and of each."""
    norms = torch.stack([tensor.norm() for tensor in tensor_lists[0]])
    return norms.norm().view(1), norms


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
