"""Names and arguments in checkpoints of runs, which are those of Megatron-LM: torch_dist, with arguments and iteration
in `common.pt`. Source of the names: megatron/training/checkpointing.py of Megatron-LM, core_r0.16.0."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
VERSION = 3.0
"""Megatron-LM's `checkpoint_version`: the order of query, key and value in a fused weight."""
_HEADS_NORM = re.compile(r"(?<=\.self_attention\.out_norm\.)weight$")
"""End of the key of a delta net's norm of heads. megatron-core 0.19.2 builds it centred on zero, as all norms of such a
model, and Megatron-Bridge stores what its factor exceeds 1 by; the factor of Hugging Face's is the weight itself."""


def preloaded(
    transformer: Mapping[str, Any],
    *,
    vocab_size: int,
    max_sequence_length: int,
    tied: bool,
    iteration: int,
    content_metadata: Mapping[str, Any],
    **arguments: Any,
) -> dict[str, Any]:
    """The content of `common.pt`. Megatron-LM compares the arguments with its own.

    `transformer`: fields of megatron-core's TransformerConfig; plain values are taken over. `tied`: whether embedding
    and output layer are one weight. `arguments`: more of Megatron-LM's. The names are those of
    megatron/training/arguments.py, core_r0.16.0.
    """
    import torch  # here, as below: who only asks where checkpoints are does without

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


def read_common(path: Path) -> dict[str, Any]:
    """Read `common.pt` of the checkpoint `path`; no class but the arguments' is let in."""
    import torch

    from slimx.models.files.safe_pickle import safe_classes

    with safe_classes(argparse.Namespace):
        return torch.load(path / "common.pt", map_location="cpu", weights_only=True)


def iteration_name(step: int) -> str:
    """Directory of the checkpoint after step `step`."""
    return f"iter_{step:07d}"


def factor_key(key: str) -> str | None:
    """Returns slimx's key for the factors of a norm of which `key` holds what they exceed 1 by; None for other keys.

    Few factors survive that in bf16, and not all in fp32: slimx writes both, and reads its own where it is."""
    return _HEADS_NORM.sub("factor", key) if _HEADS_NORM.search(key) else None
