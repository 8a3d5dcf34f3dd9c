"""Loads weights from a checkpoint of Megatron-LM into the model of trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from slimx.extras.megatron_files.directory import Fit
from slimx.trainer.checkpoint import state as states
from slimx.trainer.checkpoint.load import fill, load_sharded, unusable


def load_weights(fit: Fit, chunks: Sequence[torch.nn.Module]) -> None:
    """Loads the weights of the checkpoint that `fit` describes, saved under any parallel layout, into the model
    `chunks` of this rank. All ranks must call this function before the optimizer is built."""
    try:
        state = states.model_state(chunks, non_homogeneous_layers=fit.per_layer)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor):
                value.key = fit.keys.get(value.key, value.key)
        centered = _centered(state, fit)
        loaded = load_sharded(state, fit.path, tensors_only=True)
        for key, name in centered:
            loaded[key][name] += 1
        fill(chunks, loaded)
    except (Exception, CheckpointException) as error:
        raise unusable(fit.path, error) from error


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
