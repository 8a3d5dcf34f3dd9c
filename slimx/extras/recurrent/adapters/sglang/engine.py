"""Gated delta nets in SGLang: where an engine's parameters store the tensors of delta nets, and which functions and
operators SGLang lacks for delta nets on the CPU. Written for sglang 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol, cast

from torch import nn

from slimx.adapters.device import Gap
from slimx.adapters.sglang.weights.layout import (
    ServedParameter,
    ServedPiece,
    columns_split,
    rank_in,
    share_of_rows,
    whole,
)
from slimx.extras.recurrent.adapters.sglang import delta_net
from slimx.layout.maps import Rect


class _DeltaNet(Protocol):
    """Protocol for type checking: attributes of SGLang's Qwen3GatedDeltaNet and Qwen3_5GatedDeltaNet that functions of
    this module read."""

    key_dim: int
    value_dim: int
    conv_dim: int
    num_v_heads: int
    attn_tp_size: int
    attn_tp_rank: int


class _MergedLinear(Protocol):
    """Protocol for type checking: attributes of SGLang's MergedColumnParallelLinear that functions of this module
    read."""

    output_sizes: list[int]
    output_partition_sizes: list[int]
    tp_group: Any


def delta_convolution(parameter: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of a delta net's convolution: the filters of queries, then of keys, then of values."""
    net = cast(_DeltaNet, parameter.parent)
    width = parameter.parameter.shape[-1]
    rects = []
    start = 0
    first = 0
    for rows in (net.key_dim, net.key_dim, net.value_dim):
        shard = rows // net.attn_tp_size
        rects.append(Rect(0, first + net.attn_tp_rank * shard, 0, shard, width, start, 0))
        start += shard
        first += rows
    yield ServedPiece("{name}", (net.conv_dim, *parameter.parameter.shape[1:]), tuple(rects))


def delta_heads(parameter: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's elements of a vector with one element per value head (A_log or dt_bias)."""
    net = cast(_DeltaNet, parameter.owner)
    rows = parameter.parameter.shape[0]
    yield share_of_rows(parameter, "{name}", net.num_v_heads, rows, net.attn_tp_rank, 0)


def delta_inputs(parameter: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of a delta net's input projections, which SGLang stores in a MergedColumnParallelLinear.

    The rows come from one checkpoint tensor, whose rows are ordered by head (Qwen3-Next), or from two, whose rows are
    ordered by kind: query, key, value and gate, or b and a (Qwen3.5)."""
    owner = cast(_MergedLinear, parameter.owner)
    rank = rank_in(owner.tp_group)
    if not hasattr(parameter.parent, "_bind_packed_weight_loaders"):
        rows = parameter.parameter.shape[0]
        yield share_of_rows(parameter, "{name}", sum(owner.output_sizes), rows, rank, 0)
        return
    sizes = iter(zip(owner.output_sizes, owner.output_partition_sizes, strict=True))
    start = 0
    for kinds in ("qkv", "z") if len(owner.output_sizes) == 4 else ("b", "a"):
        rects = []
        first = 0
        for _ in kinds:
            size, shard = next(sizes)
            rects.append(Rect(0, first + rank * shard, 0, shard, parameter.cols, start, 0))
            start += shard
            first += size
        yield ServedPiece(f"{{at}}.in_proj_{kinds}.weight", (first, parameter.cols), tuple(rects))


_BARE_ATTENTION = re.compile(r"(?<=\.layers\.)(\d+)\.(?=(qkv_proj|o_proj|q_norm|k_norm)\.)")
"""Pattern of attention parameters that SGLang stores in the decoder layer itself, whereas checkpoints store them under
`self_attn`."""


def published_name(model: nn.Module, name: str) -> str:
    """Returns the name that checkpoints give to the parameter `name`, or would give to it if it was not fused."""
    return _BARE_ATTENTION.sub(r"\1.self_attn.", name)


_DELTA_NET = r"(?P<at>.+\.linear_attn)\."
ROWS = (
    (_DELTA_NET + r"in_proj_(qkvz|ba)\.weight", delta_inputs),
    (_DELTA_NET + r"conv1d\.weight", delta_convolution),
    (_DELTA_NET + r"(A_log|dt_bias)", delta_heads),
    (_DELTA_NET + r"norm\.weight", whole),
    (_DELTA_NET + r"out_proj\.weight", columns_split),
)
"""Pairs (pattern, function): the function locates the tensors in each parameter whose name matches the pattern. They
extend the table in `slimx.adapters.sglang.weights.layout`."""
GAPS = (
    Gap(
        "delta-net-operators",
        "SGLang's backend of delta nets and Qwen3.5's model look up operators of sgl_kernel's CPU build when they "
        "are imported",
        open=delta_net.operators_missing,
        close=delta_net.add_operators,
    ),
    Gap(
        "delta-net-functions",
        "SGLang's backend of delta nets imports functions of sgl_kernel's CPU build by name",
        open=delta_net.functions_missing,
        close=delta_net.add_functions,
    ),
)
"""Operators and functions for delta nets that SGLang's scheduler process lacks on the CPU, with the slimx functions
that add them."""
REPLACEMENTS = (
    (delta_net.GATED_NORM, delta_net.rms_norm_gated),
    (delta_net.GATED_LAYER_NORM, delta_net.layer_norm_gated),
    (delta_net.SHARED_EXPERT, delta_net.add_gated_expert),
)
"""Pairs (dotted name of an SGLang function, function that replaces it on the CPU)."""
