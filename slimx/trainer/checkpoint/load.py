"""Loading a torch_dist checkpoint under any layout. No byte of it is run as code.

Tensors are read by torch with `weights_only`; so are `common.pt` and the objects of a rank, whose classes are numbers,
strings, tensors and `argparse.Namespace`. `.metadata` goes through `slimx.models.files.safe_pickle`. Of a checkpoint
that is not the run's own only tensors are read.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
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
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from slimx.errors import SlimxError
from slimx.models.files.safe_pickle import read_metadata, safe_classes
from slimx.models.files.torch_dist import factor_key, read_common
from slimx.trainer.checkpoint import state as states
from slimx.trainer.checkpoint.pieces import in_pieces, load_groups
from slimx.trainer.model.build import unwrap

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Keys of a group of parameters for megatron-core's scheduler; slimx sets rate and decay itself, before every step."""
_EXTRA = "_extra_state"
"""fp8 scales of Transformer Engine's layers; absent where these layers are absent."""


def restore(
    path: Path,
    chunks: Sequence[Any],
    optimizer: Any,
    *,
    same_layout: bool,
    load_optimizer: bool = True,
    frozen: bool = False,
) -> None:
    """Read this rank's shards from `path`; collective. The random state belongs to a rank: it is read under the same
    layout only. Without `load_optimizer` the moments begin anew from the weights.

    Raises SlimxError naming the directory if the checkpoint does not fit or is damaged.
    """
    state: dict[str, Any] = states.model_state(chunks)
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
    # torch's reader raises many kinds, all of which mean that this checkpoint is unusable; one is a BaseException.
    except (Exception, CheckpointException) as error:
        raise unusable(path, error) from error
    if same_layout:
        states.set_random_state(loaded[states.RANDOM])


def _find_factors(models: Sequence[dict[str, Any]], path: Path) -> None:
    """Have norms read from slimx's own keys (`factor_key`) where the checkpoint in `path` has them: checkpoints of
    before these keys hold them under the parameters'. After the optimizer's state has been named by the parameters'."""
    known = read_metadata(path / ".metadata").state_dict_metadata
    for model in models:
        for name, tensor in model.items():
            if (key := factor_key(tensor.key)) in known:
                model[name] = replace(tensor, key=key)


def take_state(loaded: dict[str, Any], chunks: Sequence[Any], optimizer: Any) -> None:
    """Take the state of a rank of the same layout, structured as `own_state`, whose tensors were read into place."""
    fill(chunks, loaded)
    _fill_optimizer(optimizer, loaded["optimizer"])
    states.set_random_state(loaded[states.RANDOM])


def _fill_optimizer(optimizer: Any, loaded: Any) -> None:
    _take_rates(loaded, next(iter(optimizer.param_groups), {}))  # a frozen stage may have no group
    if in_pieces(optimizer):
        load_groups(optimizer, loaded)  # the tensors were read into their places
    else:
        optimizer.load_state_dict(loaded)


def _take_rates(saved: Any, own: dict[str, Any]) -> None:
    """Give the groups of `saved`, the state of an optimizer, the bounds of rates of `own`, a group of the present one,
    by which megatron-core tells groups apart: a run may go on with another learning rate."""
    for key, value in saved.items():
        if key == "param_groups":
            for group in value:
                group.update({name: own[name] for name in _RATES if name in own})
        elif isinstance(value, dict):
            _take_rates(value, own)


def unusable(path: Path, error: BaseException) -> SlimxError:
    """Returns the error for a checkpoint in `path` that `error` says cannot be loaded."""
    if isinstance(error, SlimxError):
        return error
    return SlimxError(
        f"{path}: the checkpoint cannot be loaded ({' '.join(str(error).split())[:300]})",
        code="checkpoint.load",
        about=str(path),
    )


def fill(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    """Takes the weights of the model from `loaded`. Raises SlimxError for a tensor on one side alone."""
    for key, chunk in zip(states.chunk_keys(chunks), chunks, strict=True):
        # A stage without layers (trainer.layers_per_stage) may have no tensor at all, and then it has no key.
        odd = unwrap(chunk).load_state_dict(loaded.get(key, {}), strict=False)
        if names := [name for name in (*odd.missing_keys, *odd.unexpected_keys) if _EXTRA not in name]:
            raise SlimxError(
                f"{names[0]} is in the model or in the checkpoint, but not in both",
            )


def load_sharded(state: dict[str, Any], path: Path, *, tensors_only: bool) -> dict[str, Any]:
    """Read what the sharded `state` describes, as megatron-core's `dist_checkpointing.load` does with a reader and a
    planner that run code."""
    metadata = read_metadata(path / ".metadata")
    dict_list_map_inplace(_in_place, state)
    wanted, loaded, factories = load_preprocess(state)
    wanted, _ = extract_sharded_base(wanted)
    validate_sharding_integrity(determine_global_metadata(wanted)[1])
    if not tensors_only:
        merge(loaded, read_common(path))
    merge(loaded, _read(wanted, path, metadata, tensors_only=tensors_only))
    return apply_factory_merges(loaded, factories)


def _in_place(factory: Any) -> Any:
    """A factory that joins nothing where its parts were read right into the parameter: copies of all joined projections
    would take most of the weights' memory once more."""

    if not isinstance(factory, ShardedTensorFactory):
        return factory
    whole = factory.data.detach()

    def merge(parts: Any) -> torch.Tensor:
        tensors = [part for part in nested_values({"parts": parts}) if isinstance(part, torch.Tensor)]
        inside = (0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes for part in tensors)
        return whole if all(inside) else factory.merge_fn(parts)

    return replace(factory, merge_fn=merge)


def _read(sharded: dict[str, Any], path: Path, metadata: Metadata, *, tensors_only: bool) -> dict[str, Any]:
    """Read the tensors and objects of `sharded` that the checkpoint is asked for."""

    def asked(value: Any) -> bool:
        # Everything but extra state that the checkpoint does not have.
        if not isinstance(value, ShardedObject):
            return True
        return not tensors_only and (_EXTRA not in value.key or value.unique_key in metadata.state_dict_metadata)

    wanted, _ = extract_matching_values(sharded, asked)
    tensors = [value for value in nested_values(wanted) if isinstance(value, ShardedTensor)]
    flat, flat_mapping, renamed = _replace_state_dict_keys_with_sharded_keys(wanted)
    target = mcore_to_pyt_state_dict(flat, is_loading=True)
    torch_checkpoint.load(
        target,
        storage_reader=_Reader(path, metadata),
        planner=_Planner(
            flatten_state_dict=False,
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        ),
    )
    found = {key: _unwrap_pyt_sharded_tensor(value) for key, value in target.items()}
    out = _replace_sharded_keys_with_state_dict_keys(found, flat_mapping, renamed)
    _restore_dict_types(out, wanted)
    return out


class _Reader(torch_checkpoint.FileSystemReader):
    """Reads files by metadata that has been read already."""

    def __init__(self, path: str | Path, metadata: Metadata):
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


class _Planner(MCoreLoadPlanner):
    """Objects hold plain values, tensors and, in extra state of Transformer Engine, streams."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        with safe_classes(io.BytesIO):
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
