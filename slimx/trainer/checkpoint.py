"""Megatron's distributed checkpoint (torch_dist) of model, optimizer and random state: collective over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from slimx.errors import SlimxError
from slimx.trainer.model import unwrap


class ThreadedSave(TorchDistSaveShardedStrategy):
    """The torch_dist format, written by threads of this process.

    megatron-core's own writer starts a manager process that nobody ends if the trainer is killed, and forks a writer
    per file: 7 s for a model of a few MB, and an orphan. The files are the same; loading is megatron-core's."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=torch_checkpoint.FileSystemWriter(
                checkpoint_dir, thread_count=self.thread_count, sync_files=True
            ),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _metadata() -> dict[str, Any]:
    return {
        # One tensor per parameter, whatever the layout: optimizer state can be loaded under other parallel sizes.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _state(chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    # The keys of Megatron-LM: model, or model0, model1, ... for interleaved pipeline stages.
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()
    }
    state["optimizer"] = optimizer.sharded_state_dict(state.copy(), is_loading=loading, metadata=metadata)
    return state


def _named(chunks: list[Any]) -> dict[str, Any]:
    if len(chunks) == 1:
        return {"model": unwrap(chunks[0])}
    return {f"model{number}": unwrap(chunk) for number, chunk in enumerate(chunks)}


def _random_state() -> ShardedObject:
    rank, world = dist.get_rank(), dist.get_world_size()
    return ShardedObject("random_state", torch.get_rng_state(), (world,), (rank,))


def save(path: Path, chunks: list[Any], optimizer: Any) -> None:
    """Write this rank's shards into `path`, an empty directory."""
    state = _state(chunks, optimizer, loading=False)
    state["random_state"] = _random_state()
    dist_checkpointing.save(state, str(path), ThreadedSave("torch_dist", 1))


def restore(path: Path, chunks: list[Any], optimizer: Any, *, same_layout: bool) -> None:
    """Read this rank's shards from `path`. The random state belongs to a rank: it is read under the same layout only.

    Raises SlimxError naming the directory if the checkpoint does not fit or is damaged.
    """
    state = _state(chunks, optimizer, loading=True)
    if same_layout:
        state["random_state"] = _random_state()
    try:
        loaded = dist_checkpointing.load(state, str(path))
        for name, chunk in _named(chunks).items():
            chunk.load_state_dict(loaded[name])
        optimizer.load_state_dict(loaded["optimizer"])
    # torch's reader raises many kinds, all of which mean that this checkpoint is unusable; this one is a BaseException.
    except (Exception, CheckpointException) as error:
        raise SlimxError(f"{path}: the checkpoint cannot be loaded ({' '.join(str(error).split())[:300]})") from error
    if same_layout:
        torch.set_rng_state(loaded["random_state"])
