"""Contents of a checkpoint: model, optimizer and random state as sharded tensors, with the keys of Megatron-LM since
0.16."""

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
    """Returns the `metadata` argument that Megatron-LM passes to `sharded_state_dict` by default, with `flags`
    added."""
    return {
        # One tensor per parameter, so that optimizer state can be loaded under other parallel sizes.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        **flags,
    }


def chunk_keys(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Returns the keys of this rank's model chunks in a checkpoint: `model` if there is one, else `model0`, `model1`
    and so on (virtual pipeline stages)."""
    if len(chunks) == 1:
        return ["model"]
    return [f"model{index}" for index in range(len(chunks))]


def model_state(chunks: Sequence[torch.nn.Module], **flags: bool) -> ShardedStateDict:
    """Returns {key: sharded state} for the model chunks, with the keys of `chunk_keys`. `flags`: entries added to
    `metadata`."""
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
    """Returns the sharded state of `optimizer`. `model`: sharded state of `chunks`, the modules that the optimizer
    updates. For a distributed optimizer, the returned tensors are views of the optimizer's state, so reading into them
    restores it. `loading`: True if a checkpoint will be read into the result. `frozen`: True if any rank has parameters
    without optimizer state. Then the keys name individual layers and experts, because tensors stacked over all layers
    and experts would have gaps."""
    if frozen:
        model = model_state(chunks, non_homogeneous_layers=True, singleton_local_shards=True)
    pieces = in_pieces(optimizer)
    if pieces or not loading:
        # Adam creates its moments in the first step that is not skipped; before that, there are none to write or to
        # read into. Missing moments are created as zeros, with which Adam would start.
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                make_moments(part)
    if pieces:
        return sharded_optimizer(optimizer, model)
    return optimizer.sharded_state_dict(dict(model), is_loading=loading, metadata=metadata())


def full_state(
    chunks: Sequence[torch.nn.Module], optimizer: ChainedOptimizer, *, step: int, data_size: int, frozen: bool
) -> ShardedStateDict:
    """Returns this rank's complete state for a checkpoint after `step` steps. `data_size`: data-parallel size.
    `frozen`: True if any rank has parameters without optimizer state."""
    state = local_state(chunks, optimizer, loading=False, frozen=frozen)
    for key in chunk_keys(chunks):
        state[key] = _with_centered(state[key])
    return state | common_state(chunks, step, data_size)


def _with_centered(model: ShardedStateDict) -> ShardedStateDict:
    """Returns `model`, the sharded state of a chunk, with two entries for each norm that Megatron-LM stores minus 1:
    the weight under slimx's own key, and the weight minus 1 under Megatron-LM's key."""
    out = dict(model)
    for name, tensor in model.items():
        key = factor_key(tensor.key)
        if key is not None:
            out[name] = replace(tensor, key=key)
            out[f"{name}.centered"] = replace(tensor, data=tensor.data.detach().float() - 1, dtype=torch.float32)
    return out


def local_state(
    chunks: Sequence[torch.nn.Module], optimizer: ChainedOptimizer, *, loading: bool, frozen: bool
) -> ShardedStateDict:
    """Returns this rank's state of model, optimizer and random generators, without the state shared by all ranks.
    `loading`: True if a checkpoint will be read into the result. `frozen`: True if any rank has parameters without
    optimizer state."""
    state = model_state(chunks)
    state["optimizer"] = optimizer_state(optimizer, chunks, state, loading=loading, frozen=frozen)
    state[RANDOM] = random_state()
    return state


def common_state(chunks: Sequence[torch.nn.Module], step: int, data_size: int) -> StateDict:
    """Returns the state that Megatron-LM reads before any tensor: the iteration, and the arguments of the run, which
    Megatron-LM compares with its own.

    It contains no `rng_state`, because slimx stores random state for each rank (`random_state`), and no
    `opt_param_scheduler`, because slimx computes the learning rate from the step. Megatron-LM can therefore load the
    weights with --finetune, or the weights and the iteration with --no-load-optim."""
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
    """Returns the state of all random number generators of this rank, including those of megatron-core for tensor
    parallelism."""
    # Plain numbers and tensors can be loaded without classes, so a checkpoint cannot contain code.
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
    """Restores all random number generators from `state`, the loaded result of `random_state`."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
