"""Gated delta nets in SGLang: places of their tensors, and the gaps of the CPU path. Written for sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Iterator

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


def delta_convolution(at: ServedParameter) -> Iterator[ServedPiece]:
    """The convolution of a delta net: this rank's rows of the queries', then of the keys' and the values' filters."""
    net, width = at.parent, at.parameter.shape[-1]
    rects, start, first = [], 0, 0
    for rows in (net.key_dim, net.key_dim, net.value_dim):
        shard = rows // net.attn_tp_size
        rects.append(Rect(0, first + net.attn_tp_rank * shard, 0, shard, width, start, 0))
        start, first = start + shard, first + rows
    yield ServedPiece("{name}", (net.conv_dim, *at.parameter.shape[1:]), tuple(rects))


def delta_heads(at: ServedParameter) -> Iterator[ServedPiece]:
    """A number of each value head that this rank computes."""
    net = at.owner
    yield share_of_rows("{name}", net.num_v_heads, 1, at.parameter.shape[0], net.attn_tp_rank, 0, vector=True)


def delta_inputs(at: ServedParameter) -> Iterator[ServedPiece]:
    """Input projections of a delta net, whose kinds of rows a MergedColumnParallelLinear counts: of one tensor, in
    which they stand head by head (Qwen3-Next), or of two, in which they stand one kind below the other (Qwen3.5)."""
    owner = at.owner
    if not hasattr(at.parent, "_bind_packed_weight_loaders"):
        rows = at.parameter.shape[0]
        yield share_of_rows("{name}", sum(owner.output_sizes), at.cols, rows, rank_in(owner.tp_group), 0)
        return
    sizes = iter(zip(owner.output_sizes, owner.output_partition_sizes, strict=True))
    rank, start = rank_in(owner.tp_group), 0
    for kinds in ("qkv", "z") if len(owner.output_sizes) == 4 else ("b", "a"):
        rects, first = [], 0
        for _ in kinds:
            size, shard = next(sizes)
            rects.append(Rect(0, first + rank * shard, 0, shard, at.cols, start, 0))
            start, first = start + shard, first + size
        yield ServedPiece(f"{{at}}.in_proj_{kinds}.weight", (first, at.cols), tuple(rects))


_DELTA_NET = r"(?P<at>.+\.linear_attn)\."
ROWS = (
    (_DELTA_NET + r"in_proj_(qkvz|ba)\.weight", delta_inputs),
    (_DELTA_NET + r"conv1d\.weight", delta_convolution),
    (_DELTA_NET + r"(A_log|dt_bias)", delta_heads),
    (_DELTA_NET + r"norm\.weight", whole),
    (_DELTA_NET + r"out_proj\.weight", columns_split),
)
"""Rows of `slimx.adapters.sglang.weights.layout`."""
GAPS = (
    Gap(
        "delta-net-operators",
        "operators of sgl_kernel's CPU build, which the backend of delta nets and Qwen3.5 look up when imported",
        open=delta_net.operators_missing,
        close=delta_net.add_operators,
    ),
    Gap(
        "delta-net-functions",
        "functions of sgl_kernel's CPU build that the backend of delta nets imports by name",
        open=delta_net.functions_missing,
        close=delta_net.add_functions,
    ),
)
"""Gaps of the scheduler process."""
REPLACEMENTS = (
    (delta_net.GATED_NORM, delta_net.rms_norm_gated),
    (delta_net.GATED_LAYER_NORM, delta_net.layer_norm_gated),
    (delta_net.SHARED_EXPERT, delta_net.add_gated_expert),
)
"""Functions by which the CPU path replaces SGLang's, by their dotted names."""
