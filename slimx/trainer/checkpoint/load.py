"""Loads torch_dist checkpoints under any parallel sizes, without executing code that they contain.

torch loads tensors, `common.pt` and the objects of individual ranks with `weights_only`, because all of these consist
of numbers, strings, tensors and `argparse.Namespace`. `slimx.models.files.safe_pickle` reads `.metadata`. From
checkpoints that are not resumed, such as checkpoints of other programs, only tensors are read.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from slimx.errors import SlimxError, one_line
from slimx.models.files.safe_pickle import read_metadata, safe_classes
from slimx.models.files.torch_dist import factor_key, read_common
from slimx.trainer.checkpoint import state as states
from slimx.trainer.checkpoint.pieces import in_pieces, load_groups
from slimx.trainer.model.build import unwrap

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Keys in an optimizer's parameter groups that only megatron-core's scheduler uses; slimx sets the learning rate and
weight decay itself before every step."""
_EXTRA = "_extra_state"
"""Substring of the keys under which the fp8 scales of Transformer Engine's layers are stored. Checkpoints of models
without such layers have no such keys."""


def restore(
    path: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: ChainedOptimizer,
    *,
    same_layout: bool,
    load_optimizer: bool = True,
    frozen: bool = False,
) -> None:
    """Loads this rank's shards of model, optimizer and random state from checkpoint `path`. Collective.

    `same_layout`: True if the checkpoint was written under the current parallel sizes; otherwise random state, which
    each rank has separately, is not loaded. `load_optimizer`: False to derive the fp32 main weights from the loaded
    weights and start with new moments. `frozen`: True if parameters of any rank are frozen. Raises SlimxError naming
    the directory if the checkpoint does not fit or is damaged."""
    state: ShardedStateDict = states.model_state(chunks)
    models = [state[key] for key in states.chunk_keys(chunks)]
    if load_optimizer:
        state["optimizer"] = states.optimizer_state(optimizer, chunks, state, loading=True, frozen=frozen)
    if same_layout:
        state[states.RANDOM] = states.random_state()
    try:
        _find_factors(models, path)
        loaded = load_sharded(state, path, tensors_only=False)
        fill(chunks, loaded)
        if load_optimizer:
            _fill_optimizer(optimizer, loaded["optimizer"])
        else:
            optimizer.reload_model_params()
    # torch's reader raises errors of many types, one of them a BaseException; all mean that the checkpoint is unusable.
    except (Exception, CheckpointException) as error:
        raise unusable(path, error) from error
    if same_layout:
        states.set_random_state(loaded[states.RANDOM])


def _find_factors(models: Sequence[ShardedStateDict], path: Path) -> None:
    """Makes norms of gated delta nets load their weights from slimx's keys (`factor_key`), if the checkpoint in `path`
    has these keys; older checkpoints have only the keys of the parameters. Must be called after `optimizer_state`,
    which needs the keys of the parameters."""
    stored = read_metadata(path / ".metadata").state_dict_metadata
    for model in models:
        for name, tensor in model.items():
            key = factor_key(tensor.key)
            if key in stored:
                model[name] = replace(tensor, key=key)


def take_state(loaded: StateDict, chunks: Sequence[torch.nn.Module], optimizer: ChainedOptimizer) -> None:
    """Restores a rank's state from `loaded`: the tensors that `local_state` returned, after a checkpoint has been read
    into them under the same parallel sizes."""
    fill(chunks, loaded)
    _fill_optimizer(optimizer, loaded["optimizer"])
    states.set_random_state(loaded[states.RANDOM])


def _fill_optimizer(optimizer: ChainedOptimizer, loaded: StateDict) -> None:
    _take_rates(loaded, next(iter(optimizer.param_groups), {}))  # a stage with only frozen parameters has no group
    if in_pieces(optimizer):
        load_groups(optimizer, loaded)  # the tensors were read in place
    else:
        optimizer.load_state_dict(loaded)


def _take_rates(saved: StateDict, current: StateDict) -> None:
    """Copies the values at `_RATES` from `current`, a parameter group of this run, into all groups of the optimizer
    state `saved`: megatron-core matches the groups of a run and of a checkpoint by these values, but a resumed run may
    use another learning rate."""
    rates = {name: current[name] for name in _RATES if name in current}
    for key, value in saved.items():
        if key == "param_groups":
            for group in value:
                group.update(rates)
        elif isinstance(value, dict):
            _take_rates(value, current)


def unusable(path: Path, error: BaseException) -> SlimxError:
    """Returns the SlimxError to raise if loading the checkpoint `path` failed with `error`."""
    if isinstance(error, SlimxError):
        return error
    return SlimxError(
        f"checkpoint {path} cannot be loaded ({one_line(error)}); use the parallel sizes of the run that wrote the "
        "checkpoint, or load another checkpoint",
        code="checkpoint.load",
        about=str(path),
    )


def fill(chunks: Sequence[torch.nn.Module], loaded: StateDict) -> None:
    """Loads the model's weights from `loaded` into `chunks`. Raises SlimxError for a tensor that exists only in the
    model or only in the checkpoint."""
    for key, chunk in zip(states.chunk_keys(chunks), chunks, strict=True):
        # A stage without layers (trainer.layers_per_stage) may have no tensors, and then `loaded` has no key for it.
        odd = unwrap(chunk).load_state_dict(loaded.get(key, {}), strict=False)
        for name in (*odd.missing_keys, *odd.unexpected_keys):
            if _EXTRA not in name:
                raise SlimxError(f"the model or the checkpoint lacks {name}; load a checkpoint of the same model")


def load_sharded(state: ShardedStateDict, path: Path, *, tensors_only: bool) -> StateDict:
    """Reads the tensors and objects that the sharded `state` describes. Does the same as megatron-core's
    `dist_checkpointing.load`, whose reader and planner would execute code from the checkpoint. `tensors_only`: True to
    skip objects and `common.pt`."""
    metadata = read_metadata(path / ".metadata")
    dict_list_map_inplace(_in_place, state)
    sharded, loaded, factories = load_preprocess(state)
    sharded, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    if not tensors_only:
        merge(loaded, read_common(path))
    merge(loaded, _read(sharded, path, metadata, tensors_only=tensors_only))
    return apply_factory_merges(loaded, factories)


def _in_place(value: object) -> object:
    """Returns `value` unchanged unless it is a sharded tensor factory, which splits a joined projection, such as gate
    and up, for the checkpoint. For a factory, returns one that does not merge the loaded parts if they were read
    directly into the parameter: merged copies of all joined projections would need about as much memory as the
    weights."""

    if not isinstance(value, ShardedTensorFactory):
        return value
    full = value.data.detach()

    def merge(parts: StateDict) -> torch.Tensor:
        for part in nested_values({"parts": parts}):
            if isinstance(part, torch.Tensor) and not 0 <= part.data_ptr() - full.data_ptr() < full.nbytes:
                return cast("torch.Tensor", value.merge_fn(parts))
        return cast("torch.Tensor", full)

    return replace(value, merge_fn=merge)


def _read(sharded: ShardedStateDict, path: Path, metadata: Metadata, *, tensors_only: bool) -> StateDict:
    """Reads the tensors and objects that `sharded` describes, except fp8 scales that the checkpoint does not have. If
    `tensors_only` is true, reads no objects."""

    def readable(value: object) -> bool:
        if not isinstance(value, ShardedObject):
            return True
        return not tensors_only and (_EXTRA not in value.key or value.unique_key in metadata.state_dict_metadata)

    requested, _ = extract_matching_values(sharded, readable)
    fixed = []
    resizable = {}
    for value in nested_values(requested):
        if isinstance(value, ShardedTensor):
            if value.allow_shape_mismatch:
                resizable[value.key] = value
            else:
                fixed.append(value)
    flat, flat_mapping, renamed = _replace_state_dict_keys_with_sharded_keys(requested)
    target = mcore_to_pyt_state_dict(flat, is_loading=True)
    torch_checkpoint.load(
        target,
        storage_reader=_Reader(path, metadata),
        planner=_Planner(
            flatten_state_dict=False,
            shapes_validation_sharded_tensors=fixed,
            allow_shape_mismatch_sharded_tensors=resizable,
        ),
    )
    loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in target.items()}
    out = _replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, renamed)
    _restore_dict_types(out, requested)
    return out


class _Reader(torch_checkpoint.FileSystemReader):
    """torch's reader for checkpoint files, with `metadata` that has been parsed safely; torch itself would unpickle the
    file `.metadata`."""

    def __init__(self, path: str | Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


class _Planner(MCoreLoadPlanner):
    """torch's load planner with objects restricted to data that executes no code: the objects may consist of plain
    values, tensors and, for Transformer Engine's extra state, byte streams."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with safe_classes(io.BytesIO):
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
