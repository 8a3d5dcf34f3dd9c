"""Loads weights from a checkpoint of Megatron-LM into the model of trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from slimx.extras.megatron_files.bridge import TEXT
from slimx.extras.megatron_files.directory import Fit, locations
from slimx.layout.parts import Part, matrix
from slimx.layout.table import Table
from slimx.trainer.checkpoint import state as states
from slimx.trainer.checkpoint.load import fill, load_sharded, unusable


def load_weights(fit: Fit, table: Table, chunks: Sequence[torch.nn.Module]) -> None:
    """Loads the weights of the checkpoint that `fit` describes, saved under any parallel layout, into the model
    `chunks` of this rank, whose weight table is `table`. All ranks must call this function before the optimizer is
    built."""
    try:
        state = states.model_state(chunks, non_homogeneous_layers=fit.per_layer)
        moved = _moved(state, fit, table)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor):
                value.key = fit.keys.get(value.key, value.key)
        centered = _centered(state, fit)
        loaded = load_sharded(state, fit.path, tensors_only=True)
        for key, name in centered:
            loaded[key][name] += 1
        for (key, name), (shape, part) in moved.items():
            loaded[key][name] = _in_source_order(loaded[key][name], part, shape)
        fill(chunks, loaded)
    except (Exception, CheckpointException) as error:
        raise unusable(fit.path, error) from error


def _moved(state: ShardedStateDict, fit: Fit, table: Table) -> dict[tuple[str, str], tuple[torch.Size, Part]]:
    """Gives all tensors in `state` the keys of the table of `fit`, if that is not `table`. A tensor with other rows or
    a layer axis there gets a separate buffer into which it is read.

    Returns, for each such tensor, by the key of its model chunk in `state` and its name in the chunk, its shape and its
    layout in the checkpoint."""
    if fit.table is table:
        return {}
    stored = {}
    pairs = zip(locations(table, per_layer=fit.per_layer), locations(fit.table, per_layer=fit.per_layer), strict=True)
    for location, other in pairs:
        if other.key != TEXT + location.key:
            stored[location.key] = other, (other.index, other.part.rects) != (location.index, location.part.rects)
    moved: dict[tuple[str, str], tuple[torch.Size, Part]] = {}
    for key, model in state.items():
        for name, tensor in model.items():
            if tensor.key not in stored:
                tensor.key = TEXT + tensor.key
                continue
            location, differs = stored[tensor.key]
            tensor.key = location.key
            if differs:
                axes = enumerate(zip(location.index, location.shape, strict=False))
                model[name] = ShardedTensor.from_rank_offsets(
                    location.key,
                    torch.empty(location.part.shape, dtype=tensor.dtype, device=tensor.data.device),
                    *[(axis, index, count) for axis, (index, count) in axes],
                    replica_id=tensor.replica_id,
                    prepend_axis_num=len(location.index),
                )
                moved[key, name] = tensor.data.shape, location.part
    return moved


def _in_source_order(values: torch.Tensor, part: Part, shape: torch.Size) -> torch.Tensor:
    """Returns the rows of `values`, which are in the order of `part`, in the order of its only source, as a tensor of
    `shape`."""
    rows = values.view(matrix(part.shape))
    out = torch.empty_like(rows)
    for rect in part.rects:
        out[rect.row : rect.row + rect.rows] = rows[rect.local_row : rect.local_row + rect.rows]
    return out.view(shape)


def _centered(state: ShardedStateDict, fit: Fit) -> list[tuple[str, str]]:
    """Finds the norms in `state` that the checkpoint stores with 1 subtracted, and allocates for each a separate fp32
    buffer into which the norm is read. Returns for each norm the key of its model chunk in `state`, and its name in the
    chunk. `fit`: names of the model's tensors in the checkpoint."""
    out = []
    for key, model in state.items():
        for name, tensor in model.items():
            if tensor.key in fit.centered:
                data = torch.empty_like(tensor.data, dtype=torch.float32, requires_grad=False)
                model[name] = replace(tensor, data=data, dtype=torch.float32)
                out.append((key, name))
    return out
