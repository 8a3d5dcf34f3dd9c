"""Content of `common.pt`, which a torch_dist checkpoint has beside its tensors and Megatron-LM reads first."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VERSION = 3.0
"""Megatron-LM's `checkpoint_version`: the order of query, key and value in a fused weight."""


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
    """Read `common.pt` of the torch_dist checkpoint `path`; no class but the arguments' is let in."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path / "common.pt", map_location="cpu", weights_only=True)


def saved_vocabulary(path: Path) -> int | None:
    """Tokens of the model in the torch_dist checkpoint `path`, without padding, by Megatron-LM's `args.vocab_size`;
    None where its arguments do not say, or hold classes that are not let in."""
    try:
        vocabulary = getattr(read_common(path)["args"], "vocab_size", None)
    # The arguments of other systems hold nearly any class, and a damaged file raises nearly anything.
    except Exception:
        return None
    return vocabulary if isinstance(vocabulary, int) else None
