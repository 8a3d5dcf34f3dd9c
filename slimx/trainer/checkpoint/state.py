"""Content of a checkpoint: model, optimizer and random state as sharded tensors, keyed as in Megatron-LM since 0.16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from slimx.models.files.torch_dist import factor_key, preloaded
from slimx.trainer.checkpoint.pieces import in_pieces, sharded_optimizer
from slimx.trainer.model.build import unwrap
from slimx.trainer.step.optimizer import make_moments

RANDOM = "random_state"


def metadata(**flags: bool) -> dict[str, Any]:
    """The metadata that Megatron-LM passes to `sharded_state_dict` by default; `flags` are added."""
    return {
        # One tensor per parameter, whatever the layout: optimizer state can be loaded under other parallel sizes.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        **flags,
    }


def chunk_keys(chunks: Sequence[Any]) -> list[str]:
    """Keys of the model chunks: one is `model`, several (virtual pipeline stages) are `model0`, `model1`, ..."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def model_state(chunks: Sequence[Any], **flags: bool) -> dict[str, Any]:
    """Sharded state of every chunk by its key."""
    described = metadata(**flags)
    return {
        key: unwrap(chunk).sharded_state_dict(metadata=described)
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True)
    }


def optimizer_state(
    optimizer: Any, chunks: Sequence[Any], model: dict[str, Any], *, loading: bool, frozen: bool
) -> Any:
    """Sharded state of the optimizer of `chunks`, whose sharded state is `model`, as views of it where it is a
    distributed one: reading into them restores it.

    `frozen`: whether any rank has parameters without state. A key then names one layer and one expert: stacked over all
    of them, as otherwise, it would have holes."""
    if frozen:
        model = model_state(chunks, non_homogeneous_layers=True, singleton_local_shards=True)
    pieces = in_pieces(optimizer)
    if pieces or not loading:
        # Adam makes moments at its first step; before it (or when it was skipped) there are none to write, or to read
        # into. Zeros are what it starts from; a state that is there stays.
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                make_moments(part)
    if pieces:
        return sharded_optimizer(optimizer, model)
    return optimizer.sharded_state_dict(dict(model), is_loading=loading, metadata=metadata())


def full_state(chunks: Sequence[Any], optimizer: Any, *, step: int, data_size: int, frozen: bool) -> dict[str, Any]:
    """The whole state of a checkpoint after step `step`; `frozen`: see `optimizer_state`."""
    state = own_state(chunks, optimizer, loading=False, frozen=frozen)
    for key in chunk_keys(chunks):
        state[key] = _with_centred(state[key])
    return state | common_state(chunks, step, data_size)


def _with_centred(model: dict[str, Any]) -> dict[str, Any]:
    """The sharded state `model` of a chunk with the norms that Megatron-LM keeps less 1 under both keys."""
    out = dict(model)
    for name, tensor in model.items():
        if (key := factor_key(tensor.key)) is not None:
            out[name] = replace(tensor, key=key)
            out[f"{name}.centred"] = replace(tensor, data=tensor.data.detach().float() - 1, dtype=torch.float32)
    return out


def own_state(chunks: Sequence[Any], optimizer: Any, *, loading: bool, frozen: bool) -> dict[str, Any]:
    """The state that is this rank's own, without what all ranks have in common; `frozen`: see `optimizer_state`."""
    state = model_state(chunks)
    state["optimizer"] = optimizer_state(optimizer, chunks, state, loading=loading, frozen=frozen)
    state[RANDOM] = random_state()
    return state


def common_state(chunks: Sequence[Any], step: int, data_size: int) -> dict[str, Any]:
    """The state that Megatron-LM reads before any tensor: the iteration, and arguments to compare with its own.

    There is no `rng_state` (ours is one per rank, see `random_state`) and no `opt_param_scheduler` (ours is a function
    of the step): Megatron-LM loads the weights with --finetune, or with --no-load-optim at the same iteration."""
    model = unwrap(chunks[0])
    described = {key: value for key, value in metadata().items() if key != "dp_cp_group"}
    return preloaded(
        vars(model.config),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        tied=model.share_embeddings_and_output_weights,
        iteration=step,
        content_metadata=described,
        data_parallel_size=data_size,
        world_size=dist.get_world_size(),
        no_save_optim=False,
    )


def random_state() -> ShardedObject:
    """Every generator of this rank, megatron-core's tensor-parallel ones included."""
    # Plain numbers and tensors: loading them needs no class, so that no code can hide in them.
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    return ShardedObject(RANDOM, state, (dist.get_world_size(),), (dist.get_rank(),))


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator where `random_state` found it."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
