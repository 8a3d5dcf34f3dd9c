"""Arguments and iteration in a torch_dist checkpoint, which Megatron-LM reads first: `common.pt`, or since
megatron-core 0.19 an object among the tensors. slimx writes `common.pt`, which both read."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = 3.0
"""Megatron-LM's `checkpoint_version`: the order of query, key and value in a fused weight."""
_OBJECT = "common_state/shard_0_1"
"""Key of the object: a list whose only element is what `common.pt` would hold."""


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
    """Read what the torch_dist checkpoint `path` says of itself; no class but the arguments' is let in."""
    import torch

    from slimx.models.files.safe_pickle import read_object, safe_classes

    file = path / "common.pt"
    inside = None if file.is_file() else read_object(path, _OBJECT)
    with safe_classes(argparse.Namespace):
        if inside is None:
            return torch.load(file, map_location="cpu", weights_only=True)
        return torch.load(io.BytesIO(inside), map_location="cpu", weights_only=True)[0]


def saved_vocabulary(path: Path) -> int | None:
    """Tokens of the model in the torch_dist checkpoint `path`, without padding, by Megatron-LM's `args.vocab_size`;
    None where its arguments do not say, or hold classes that are not let in."""
    try:
        vocabulary = getattr(read_common(path)["args"], "vocab_size", None)
    # The arguments of other systems hold nearly any class, and a damaged file raises nearly anything.
    except Exception:
        return None
    return vocabulary if isinstance(vocabulary, int) else None
