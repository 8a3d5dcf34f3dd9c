"""Arguments and iteration in a torch_dist checkpoint: `common.pt`, or since megatron-core 0.19 an object among the
tensors."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import torch

from slimx.models.files import torch_dist
from slimx.models.files.safe_pickle import read_metadata, safe_classes

_OBJECT = "common_state/shard_0_1"
"""Key of the object: a list whose only element is what `common.pt` would hold."""


def read_common(path: Path) -> dict[str, Any]:
    """Read what the torch_dist checkpoint `path` says of itself; no class but the arguments' is let in."""
    inside = None if (path / "common.pt").is_file() else read_object(path, _OBJECT)
    if inside is None:
        return torch_dist.read_common(path)
    with safe_classes(argparse.Namespace):
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


def read_object(directory: Path, key: str) -> bytes | None:
    """The bytes of the object `key` of a torch_dist checkpoint, as torch.save wrote them; None if it has no such."""
    for index, place in read_metadata(directory / ".metadata").storage_data.items():
        if index.fqn == key:
            with (directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                return file.read(place.length)
    return None
