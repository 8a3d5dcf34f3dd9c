"""The distributed optimizer's state as pieces of the parameters that it belongs to, right where it lies.

    parameter [rows, cols]   ...#    a rank's share of the buffer ends or begins anywhere in a parameter: what it holds
                             ####    of one is the end of a row, whole rows and the begin of a row
                             ##..

On disk it is what megatron-core calls fully_reshardable: a tensor for each parameter and kind of state, under the
parameter's name and in its shape, which any layout can read. megatron-core gathers every buffer on all data-parallel
ranks to write it, twice on the device and several times on the host. But torch's format takes any boxes that cover a
tensor, so each rank writes its own pieces, and reads them back into the place of its state: nothing is gathered or
copied, and no memory is needed beside the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes by dimension."""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The boxes that together are elements `start` to `end` of a row-major tensor, in their order: of d dimensions at
    most 2 d - 1."""
    if start >= end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], number: int, start: int, end: int) -> Iterator[Box]:
    before = number * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, end - before):
        yield (number, *offsets), (1, *sizes)


_PREFIX = "optimizer.state"


def in_pieces(optimizer: Any) -> bool:
    """Returns True if the state is that of distributed optimizers, which alone is split within parameters."""
    return all(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def sharded_optimizer(optimizer: Any, model: dict[str, Any]) -> dict[Any, Any]:
    """The state of a chained `optimizer` whose moments exist, as megatron-core's `sharded_state_dict` structures it.
    `model`: the sharded state of its chunks. The tensors are views of the state: reading into them restores it."""
    parts = optimizer.chained_optimizers
    if len(parts) > 1:
        optimizer._synchronize_steps()
    of_parameter = {each.data: each for each in nested_values(model) if isinstance(each.data, torch.nn.Parameter)}
    states = [_sharded_part(part, of_parameter) for part in parts]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def load_groups(optimizer: Any, saved: dict[Any, Any]) -> None:
    """Take the steps and rates of a checkpoint; `saved`: what it keeps beside tensors, as `sharded_optimizer` makes
    it. The parts and groups of both must be the same."""
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        of_part = saved if len(parts) == 1 else saved[number]
        known = {_identity(group): group for group in of_part["optimizer"]["param_groups"]}
        for group in part.param_groups:
            group.update({key: value for key, value in known[_identity(group)].items() if key != "params"})
    if len(parts) > 1:
        optimizer._synchronize_steps()


def _sharded_part(part: DistributedOptimizer, of_parameter: dict[Any, Any]) -> dict[str, Any]:
    pieces: list[dict[str, ShardedTensor]] = []
    for parameter, start, end in _owned(part):
        held = {
            kind: tensor.detach()
            for kind, tensor in part._get_main_param_and_optimizer_states(parameter).items()
            if tensor.dim()  # a step is kept with its group
        }
        for whole, box in _regions(of_parameter[parameter], parameter):
            pieces += _pieces(whole, box, tuple(parameter.shape), start, end, held)
    return {
        **part.state_dict(),
        "param_state": dict(enumerate(pieces)),
        "param_state_sharding_type": "fully_reshardable",
    }


def _owned(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Parameters of which this rank holds state, and from which element to which."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _regions(sharded: ShardedTensor | ShardedTensorFactory, parameter: torch.Tensor) -> Iterator[tuple[Any, Box]]:
    """The checkpoint's tensors that a parameter is split into, and the box of the parameter that each is: most are one
    tensor, the joined gate and up projections two."""
    if isinstance(sharded, ShardedTensor):
        yield sharded, ((0,) * parameter.dim(), tuple(parameter.shape))
        return
    shape = torch.empty_like(parameter, device="meta")
    for part in _sharded_tensors(sharded.build_fn(sharded.key, shape, sharded.replica_id, None)):
        offsets, rest = [], part.data.storage_offset()
        for stride in shape.stride():
            offsets.append(rest // stride)
            rest %= stride
        yield part, (tuple(offsets), tuple(part.data.shape))


def _sharded_tensors(built: Any) -> Iterable[ShardedTensor]:
    return [each for each in nested_values({"built": built}) if isinstance(each, ShardedTensor)]


def _pieces(
    whole: ShardedTensor,
    region: Box,
    shape: tuple[int, ...],
    start: int,
    end: int,
    held: dict[str, torch.Tensor],
) -> Iterator[dict[str, ShardedTensor]]:
    """Pieces that elements `start` to `end` of a parameter of `shape` share with `region`, which is `whole` in the
    checkpoint. `held`: the state of these elements by kind, flat."""
    at = start
    for offsets, sizes in boxes(shape, start, end):
        low = [max(a, b) for a, b in zip(offsets, region[0], strict=True)]
        high = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, *region, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            inside = tuple(slice(a - offset, b - offset) for a, b, offset in zip(low, high, offsets, strict=True))
            local = [a - b for a, b in zip(low, region[0], strict=True)]
            yield {
                kind: _piece(whole, kind, flat[at - start : at - start + prod(sizes)].view(sizes)[inside], local)
                for kind, flat in held.items()
            }
        at += prod(sizes)


def _piece(whole: ShardedTensor, kind: str, data: torch.Tensor, local: Sequence[int]) -> ShardedTensor:
    """The part `data` of the state of `whole` that begins at offsets `local` of its local shard."""
    axes = whole.prepend_axis_num
    data = data[(None,) * axes]
    return replace(
        whole,
        key=f"{_PREFIX}.{kind}.{whole.key}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=(
            *whole.global_offset[:axes],
            *(a + b for a, b in zip(whole.global_offset[axes:], local, strict=True)),
        ),
        axis_fragmentations=None,
        prepend_axis_num=0,
        # Replicas of other pipeline or tensor-parallel ranks stay replicas; data-parallel ranks have nothing in common.
        replica_id=(*whole.replica_id[:2], 0),
    )


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """Values that tell a group of parameters from the others, as megatron-core compares them."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)
