"""The state of megatron-core's distributed optimizer as sharded tensors that need no copies.

    parameter [rows, cols]   ...#    a rank's shard of a buffer may start and end anywhere within a parameter: its part
                             ####    of the parameter is the end of a row, complete rows, and the start of a row
                             ##..

On disk this is megatron-core's fully_reshardable format: one tensor per parameter and kind of state, with the
parameter's name and shape, which can be loaded under any parallel sizes. To write it, megatron-core gathers every
buffer on all data-parallel ranks, with two copies on the device and several on the host. However, torch's format
accepts a tensor in any boxes (sub-arrays) that cover it. So each rank writes the boxes that its shard consists of, as
views of the optimizer's memory, and loads them back into the same memory, without gathering and without additional
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, param_group_identifier_keys

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Sub-array of a tensor: its offsets and its sizes, by dimension."""

type Sharded = ShardedTensor | ShardedTensorFactory


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Splits elements [start, end) of a row-major tensor with d dimensions into at most 2d - 1 boxes (sub-arrays), in
    the order of the elements."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = prod(shape[1:])
    first = -(-start // row)
    last = end // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> Iterator[Box]:
    before = index * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, end - before):
        yield (index, *offsets), (1, *sizes)


_PREFIX = "optimizer.state"


def in_pieces(optimizer: ChainedOptimizer) -> bool:
    """Returns True if the state of `optimizer` is saved as boxes, because all of its chained optimizers are distributed
    optimizers, whose shards may start and end within a parameter."""
    return all(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def sharded_optimizer(optimizer: ChainedOptimizer, model: ShardedStateDict) -> StateDict:
    """Returns the sharded state of `optimizer`, whose moments must exist, in the structure of megatron-core's
    `sharded_state_dict`. `model`: sharded state of the optimizer's model. The tensors are views of the optimizer's
    state, so reading into them restores it."""
    parts = optimizer.chained_optimizers
    if len(parts) > 1:
        optimizer._synchronize_steps()
    by_parameter = {}
    for sharded in nested_values(model):
        if isinstance(sharded.data, torch.nn.Parameter):
            by_parameter[sharded.data] = sharded
    states = [_sharded_part(part, by_parameter) for part in parts]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def load_groups(optimizer: ChainedOptimizer, saved: StateDict) -> None:
    """Restores the step counts, learning rates and other values of the parameter groups from `saved`, the loaded result
    of `sharded_optimizer` for an optimizer with the same parameter groups."""
    parts = optimizer.chained_optimizers
    for index, part in enumerate(parts):
        saved_part = saved if len(parts) == 1 else saved[index]
        saved_groups = {_identity(group): group for group in saved_part["optimizer"]["param_groups"]}
        for group in part.param_groups:
            for key, value in saved_groups[_identity(group)].items():
                if key != "params":
                    group[key] = value
    if len(parts) > 1:
        optimizer._synchronize_steps()


def _sharded_part(part: DistributedOptimizer, by_parameter: dict[torch.nn.Parameter, Sharded]) -> StateDict:
    pieces: list[ShardedStateDict] = []
    for parameter, start, end in _local_ranges(part):
        flat_states = {}
        for kind, tensor in part._get_main_param_and_optimizer_states(parameter).items():
            if tensor.dim():  # step counts, which are scalars, are saved with their group
                flat_states[kind] = tensor.detach()
        for sharded, region in _regions(by_parameter[parameter], parameter):
            pieces += _pieces(sharded, region, tuple(parameter.shape), start, end, flat_states)
    return {
        **part.state_dict(),
        "param_state": dict(enumerate(pieces)),
        "param_state_sharding_type": "fully_reshardable",
    }


def _local_ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yields each parameter for which this rank has optimizer state, with the start and end (exclusive) of the range of
    elements that the state covers."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _regions(sharded: Sharded, parameter: torch.Tensor) -> Iterator[tuple[ShardedTensor, Box]]:
    """Yields the tensors in which a checkpoint stores a parameter, each with the box (sub-array) of the parameter that
    the tensor contains. A parameter usually has one such tensor, but joined gate and up projections have two."""
    if isinstance(sharded, ShardedTensor):
        yield sharded, ((0,) * parameter.dim(), tuple(parameter.shape))
        return
    shape = torch.empty_like(parameter, device="meta")
    built = sharded.build_fn(sharded.key, shape, sharded.replica_id, None)
    for part in nested_values({"built": built}):
        if not isinstance(part, ShardedTensor):
            continue
        offsets = []
        rest = part.data.storage_offset()
        for stride in shape.stride():
            offsets.append(rest // stride)
            rest %= stride
        yield part, (tuple(offsets), tuple(part.data.shape))


def _pieces(
    sharded: ShardedTensor,
    region: Box,
    shape: tuple[int, ...],
    start: int,
    end: int,
    states: dict[str, torch.Tensor],
) -> Iterator[ShardedStateDict]:
    """Yields, as sharded tensors, the optimizer state of elements `start` to `end` of a parameter with shape `shape`,
    limited to the box `region` of the parameter, which the checkpoint stores as the tensor `sharded`. `states`: flat
    state of these elements by kind, such as exp_avg."""
    first = start
    region_start, region_sizes = region
    for offsets, sizes in boxes(shape, start, end):
        count = prod(sizes)
        inside = []
        local = []
        for offset, size, low, length in zip(offsets, sizes, region_start, region_sizes, strict=True):
            begin = max(offset, low)
            inside.append(slice(begin - offset, min(offset + size, low + length) - offset))
            local.append(begin - low)
        if all(part.start < part.stop for part in inside):
            piece = {}
            for kind, flat in states.items():
                box = flat[first - start : first - start + count].view(sizes)
                piece[kind] = _piece(sharded, kind, box[tuple(inside)], local)
            yield piece
        first += count


def _piece(sharded: ShardedTensor, kind: str, data: torch.Tensor, local: Sequence[int]) -> ShardedTensor:
    """Returns `data`, a part of the optimizer state of the tensor that `sharded` describes, as a sharded tensor.
    `local`: offsets of the part within the tensor's local shard."""
    axes = sharded.prepend_axis_num
    data = data[(None,) * axes]
    inner = [start + offset for start, offset in zip(sharded.global_offset[axes:], local, strict=True)]
    return replace(
        sharded,
        key=f"{_PREFIX}.{kind}.{sharded.key}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=(*sharded.global_offset[:axes], *inner),
        axis_fragmentations=None,
        prepend_axis_num=0,
        # Pipeline and tensor-parallel ranks may have replicas of this state; data-parallel ranks have different parts.
        replica_id=(*sharded.replica_id[:2], 0),
    )


def _identity(group: dict[str, object]) -> tuple[object, ...]:
    """Returns the values by which megatron-core distinguishes the parameter group `group` from other groups."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)
