"""Python interface of exact mode's CPU kernels (`csrc/exact.h`), whose results are bitwise equal to those of the
functions with the same names in `reference.py`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from slimx.errors import SlimxError

# `combine` and `rotate` are elementwise and as fast in torch.
from slimx.extras.exact.operations.forward.reference import Gathered
from slimx.extras.exact.operations.forward.reference import combine as combine
from slimx.extras.exact.operations.forward.reference import rotate as rotate
from slimx.extras.exact.ordered.kernel import ISAS, WeightGroup, load

MOST_LEAVES = 64
"""Maximum number of leaves per sum that the kernels support; equals SLIMX_MOST_LEAVES in csrc/exact.h."""
_WIDE = {torch.float32: 1, torch.bfloat16: 0}


class AttentionCall(ctypes.Structure):
    """Arguments of an attention kernel, in the layout of the struct SlimxExactAttention in csrc/exact.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "index", "begin", "length", "sinks", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "groups", "d", "dv")),
        ("scale", ctypes.c_float),
        ("wide", ctypes.c_int32),
    ]

    @classmethod
    def of(
        cls, query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> AttentionCall:
        """Builds the struct from contiguous tensors, which the caller must keep alive until the kernel that receives
        the struct returns. Raises SlimxError for unsupported dtypes."""
        key, value, index, begin, length = read
        if not query.dtype == key.dtype == value.dtype:
            raise SlimxError(
                f"query, key and value have different dtypes ({query.dtype}, {key.dtype} and {value.dtype}); convert "
                "all three tensors to the same dtype",
                code="exact.dtype",
                about="query, key and value",
            )
        check_dtype("index", index, torch.int32)
        check_dtype("begin", begin, torch.int64)
        check_dtype("length", length, torch.int64)
        inputs = (t.data_ptr() for t in (query, *read))
        sinks_address = None if sinks is None else sinks.data_ptr()
        sizes = *query.shape[:2], key.shape[1], query.shape[2], value.shape[2]
        return cls(*inputs, sinks_address, out.data_ptr(), *sizes, scale, wide_of(query))


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
    *,
    isa: str = "best",
) -> torch.Tensor:
    """Computes one linear layer per expert, bitwise equal to `reference.linear`. `isa`: instruction set of the kernel,
    one of `ordered.kernel.isas()`; "best": the fastest that this processor supports."""
    if leaves > MOST_LEAVES:
        raise SlimxError(
            f"row-parallel sums have {leaves} leaves, but the kernels support at most {MOST_LEAVES}; set "
            f"numerics.leaves to at most {MOST_LEAVES}",
            code="exact.leaves",
            about=str(leaves),
        )
    x = x.contiguous()
    weights = [weight.contiguous() for weight in weights]
    columns = check_weights(x, weights)
    out = x.new_empty(len(x), columns, dtype=dtype)
    groups = (WeightGroup * len(weights))()
    for group, weight, count in zip(groups, weights, counts, strict=True):
        group.weight = weight.data_ptr()
        group.rows = count
    sizes = len(weights), columns, x.shape[1], leaves
    _call("linear", isa, x.data_ptr(), groups, *sizes, wide_of(x), out.data_ptr(), wide_of(out))
    return out


def check_dtype(name: str, t: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises SlimxError unless the tensor `t` has dtype `dtype`, because kernels receive only its address. `name`: the
    tensor's name in the error."""
    if t.dtype != dtype:
        raise SlimxError(
            f"{name} has dtype {t.dtype}, but must have dtype {dtype}; convert {name} to {dtype}",
            code="kernel.dtype",
            about=name,
        )


def check_weights(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Returns N, the number of rows of each of `weights` [N, K]. Raises SlimxError unless all weights have the dtype of
    `x` and the same shape, with as many columns as `x` [T, K]."""
    columns = weights[0].shape[0]
    for index, weight in enumerate(weights):
        if weight.shape != (columns, x.shape[1]) or weight.dtype != x.dtype:
            raise SlimxError(
                f"weights[{index}] has shape {list(weight.shape)} and dtype {weight.dtype}, but must have shape "
                f"{[columns, x.shape[1]]} and dtype {x.dtype} to match x and weights[0]; pass a matching matrix",
                code="exact.weights",
                about="weights",
            )
    return columns


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, isa: str = "best") -> torch.Tensor:
    """Computes RMSNorm, bitwise equal to that of `reference.rms_norm`. If the dtypes of x and weight differ, both are
    first converted to fp32. `isa`: as in `linear`."""
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps, isa=isa).to(x.dtype)
    x = x.contiguous()
    weight = weight.contiguous()
    out = torch.empty_like(x)
    _call("rms_norm", isa, x.data_ptr(), weight.data_ptr(), *x.shape, ctypes.c_float(eps), wide_of(x), out.data_ptr())
    return out


def silu_and_mul(x: torch.Tensor, *, isa: str = "best") -> torch.Tensor:
    """Computes SwiGLU's product silu(gate) * up, bitwise equal to that of `reference.silu_and_mul`. `isa`: as in
    `linear`."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _call("silu_and_mul", isa, x.data_ptr(), *out.shape, wide_of(x), out.data_ptr())
    return out


def log_normalizer(
    logits: torch.Tensor, temperature: torch.Tensor, *, isa: str = "best"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the two terms that log-softmax subtracts from logits, bitwise equal to those of
    `reference.log_normalizer`. `isa`: as in `linear`."""
    check_dtype("temperature", temperature, torch.float32)
    logits = logits.contiguous()
    temperature = temperature.contiguous()
    most, log_sum = torch.empty(2, len(logits)).unbind()
    outputs = most.data_ptr(), log_sum.data_ptr()
    _call("log_normalizer", isa, logits.data_ptr(), temperature.data_ptr(), *logits.shape, wide_of(logits), *outputs)
    return most, log_sum


def attend(
    query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None, *, isa: str = "best"
) -> torch.Tensor:
    """Computes attention over cached keys and values, bitwise equal to that of `reference.attend`. All tensors except
    `sinks` must be contiguous. `isa`: as in `linear`."""
    sinks = None if sinks is None else sinks.float().contiguous()
    out = query.new_empty(*query.shape[:2], read.value.shape[2])
    record = AttentionCall.of(query, read, scale, sinks, out)
    _call("attend", isa, ctypes.byref(record))
    return out


@functools.cache
def _declare() -> None:
    """Declares the signatures of this module's kernels to ctypes."""
    library = load()
    address = ctypes.c_void_p
    count = ctypes.c_int64
    code = ctypes.c_int
    real = ctypes.c_float
    library.slimx_exact_rms_norm.argtypes = [address, address, count, count, real, code, address, code, code]
    library.slimx_exact_silu_and_mul.argtypes = [address, count, count, code, address, code, code]
    library.slimx_exact_log_normalizer.argtypes = [
        *(address, address, count, count),
        *(code, address, address, code, code),
    ]
    library.slimx_exact_attend.argtypes = [address, code, code]


def wide_of(t: torch.Tensor) -> int:
    """Returns the code for the dtype of `t` in kernel arguments: 1 for fp32, 0 for bf16. Raises SlimxError for any
    other dtype."""
    if t.dtype not in _WIDE:
        raise SlimxError(
            f"numerics.mode=exact supports only bf16 and fp32, but received a tensor of dtype {t.dtype} on {t.device}; "
            "convert the tensor to bf16 or fp32",
            code="exact.dtype",
            about=str(t.dtype),
        )
    return _WIDE[t.dtype]


def _call(name: str, isa: str, *arguments: object) -> None:
    _declare()
    status = getattr(load(), f"slimx_exact_{name}")(*arguments, ISAS[isa], torch.get_num_threads())
    if status == 1:
        raise SlimxError(
            f"no memory is left for the kernel {name} of numerics.mode=exact; lower trainer.max_tokens_per_microbatch",
        )
    if status:
        raise SlimxError(
            f"this processor lacks the instruction set {isa} for exact mode's kernel {name}; pass isa='best'"
        )
