"""File names and contents of a run's checkpoints that Megatron-LM also reads: format torch_dist, with arguments and
iteration in `common.pt`. The names are those of megatron/training/checkpointing.py in Megatron-LM core_r0.16.0."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from slimx.json_types import Json

TRACKER = "latest_checkpointed_iteration.txt"
VERSION = 3.0
"""Megatron-LM's `checkpoint_version`, which determines the order of query, key and value in a fused weight."""
_HEADS_NORM = re.compile(r"(?<=\.self_attention\.out_norm\.)weight$")
"""Pattern of the checkpoint key of a gated delta net's norm over heads. megatron-core 0.19.2 builds this norm
zero-centered, like all norms of such a model, so Megatron-Bridge stores the factor minus 1. Hugging Face's weight is
the factor itself."""


def preloaded(
    transformer: Mapping[str, object],
    *,
    vocab_size: int,
    max_sequence_length: int,
    tied: bool,
    iteration: int,
    content_metadata: Mapping[str, object],
    **arguments: object,
) -> Json:
    """Returns the contents of `common.pt`, including the arguments that Megatron-LM compares with its current ones when
    it loads the checkpoint.

    `transformer`: fields of megatron-core's TransformerConfig; only values that are numbers, strings, dtypes or None
    are copied. `tied`: True if embedding and output layer share one weight. `content_metadata`: megatron-core's
    description of the checkpoint's content. `arguments`: further arguments of Megatron-LM, named as in
    megatron/training/arguments.py, core_r0.16.0."""
    import torch  # not at module level, because callers that only locate checkpoints run without torch

    plain = {k: v for k, v in transformer.items() if isinstance(v, int | float | str | torch.dtype | None)}
    return {
        "args": argparse.Namespace(
            **plain,
            vocab_size=vocab_size,
            padded_vocab_size=vocab_size,
            max_position_embeddings=max_sequence_length,
            untie_embeddings_and_output_weights=not tied,
            add_position_embedding=False,
            iteration=iteration,
            ckpt_format="torch_dist",
            use_dist_ckpt=True,
            no_save_rng=True,
            **arguments,
        ),
        "checkpoint_version": VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(content_metadata),
    }


def read_common(path: Path) -> Json:
    """Returns the contents of `common.pt` in the checkpoint directory `path`. Unpickling allows only torch's classes
    and argparse.Namespace, the class of the stored Megatron-LM arguments."""
    import torch

    from slimx.models.files.safe_pickle import safe_classes

    with safe_classes(argparse.Namespace):
        return torch.load(path / "common.pt", map_location="cpu", weights_only=True)


def iteration_name(step: int) -> str:
    """Returns the directory name of the checkpoint saved after training step `step`, such as iter_0000100."""
    return f"iter_{step:07d}"


def factor_key(key: str) -> str | None:
    """Returns the checkpoint key under which slimx stores the factors of a delta net's norm over heads if `key` is that
    of the factors minus 1; None for all other keys.

    Subtracting 1 rounds most factors in bf16, and some in fp32. slimx therefore writes both tensors, and reads the
    factors if a checkpoint contains them."""
    return _HEADS_NORM.sub("factor", key) if _HEADS_NORM.search(key) else None
