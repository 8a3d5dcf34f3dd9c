"""Checkpoint content: model, optimizer and random state as sharded tensors, keyed as in Megatron-LM since 0.16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from slimx.models.files.torch_dist import factor_key, preloaded
from slimx.trainer.checkpoint.pieces import in_pieces, sharded_optimizer
from slimx.trainer.model.build import unwrap
from slimx.trainer.step.optimizer import make_moments

RANDOM = "random_state"


def metadata(**flags: bool) -> dict[str, object]:
    """Returns the metadata that Megatron-LM passes to `sharded_state_dict` by default, with `flags` added."""
    return {
        # One tensor per parameter, whatever the layout: optimizer state can be loaded under other parallel sizes.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        **flags,
    }


def chunk_keys(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Returns the keys of the model chunks: `model` for one, `model0`, `model1`, ... for virtual pipeline stages."""
    if len(chunks) == 1:
        return ["model"]
    return [f"model{index}" for index in range(len(chunks))]


def model_state(chunks: Sequence[torch.nn.Module], **flags: bool) -> ShardedStateDict:
    """Returns the sharded state of every chunk by its key."""
    options = metadata(**flags)
    return {
        key: unwrap(chunk).sharded_state_dict(metadata=options)
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True)
    }


def optimizer_state(
    optimizer: ChainedOptimizer,
    chunks: Sequence[torch.nn.Module],
    model: ShardedStateDict,
    *,
    loading: bool,
    frozen: bool,
) -> ShardedStateDict:
    """Returns the sharded state of the optimizer of `chunks`, whose sharded state is `model`. That of a distributed
    optimizer consists of views: reading into them restores it.

    `frozen`: whether any rank has parameters without state. Keys then name one layer and one expert, since tensors
    stacked over all of them would have holes."""
    if frozen:
        model = model_state(chunks, non_homogeneous_layers=True, singleton_local_shards=True)
    pieces = in_pieces(optimizer)
    if pieces or not loading:
        # Adam creates its moments at the first step; before it (or if it was skipped) there are none to write or to
        # read into. It starts from zeros; existing state stays.
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                make_moments(part)
    if pieces:
        return sharded_optimizer(optimizer, model)
    return optimizer.sharded_state_dict(dict(model), is_loading=loading, metadata=metadata())


def full_state(
    chunks: Sequence[torch.nn.Module], optimizer: ChainedOptimizer, *, step: int, data_size: int, frozen: bool
) -> ShardedStateDict:
    """Returns the complete content of a checkpoint after step `step`; `frozen`: see `optimizer_state`."""
    state = local_state(chunks, optimizer, loading=False, frozen=frozen)
    for key in chunk_keys(chunks):
        state[key] = _with_centred(state[key])
    return state | common_state(chunks, step, data_size)


def _with_centred(model: ShardedStateDict) -> ShardedStateDict:
    """Returns the sharded state `model` of a chunk with both keys for norms that Megatron-LM stores minus 1."""
    out = dict(model)
    for name, tensor in model.items():
        key = factor_key(tensor.key)
        if key is not None:
            out[name] = replace(tensor, key=key)
            out[f"{name}.centred"] = replace(tensor, data=tensor.data.detach().float() - 1, dtype=torch.float32)
    return out


def local_state(
    chunks: Sequence[torch.nn.Module], optimizer: ChainedOptimizer, *, loading: bool, frozen: bool
) -> ShardedStateDict:
    """Returns this rank's state, without the part common to all ranks; `frozen`: see `optimizer_state`."""
    state = model_state(chunks)
    state["optimizer"] = optimizer_state(optimizer, chunks, state, loading=loading, frozen=frozen)
    state[RANDOM] = random_state()
    return state


def common_state(chunks: Sequence[torch.nn.Module], step: int, data_size: int) -> StateDict:
    """Returns the state that Megatron-LM reads before any tensor: the iteration, and arguments to compare with its own.

    It has no `rng_state` (ours is per rank, see `random_state`) and no `opt_param_scheduler` (ours is a function of the
    step): Megatron-LM loads the weights with --finetune, or with --no-load-optim at the same iteration."""
    model = unwrap(chunks[0])
    content = metadata()
    del content["dp_cp_group"]
    return preloaded(
        vars(model.config),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        tied=model.share_embeddings_and_output_weights,
        iteration=step,
        content_metadata=content,
        data_parallel_size=data_size,
        world_size=dist.get_world_size(),
        no_save_optim=False,
    )


def random_state() -> ShardedObject:
    """Returns the state of all random generators of this rank, including megatron-core's tensor-parallel ones."""
    # Plain numbers and tensors: they load without classes, so they cannot carry code.
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    return ShardedObject(RANDOM, state, (dist.get_world_size(),), (dist.get_rank(),))


def set_random_state(state: StateDict) -> None:
    """Restores every generator from the state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
