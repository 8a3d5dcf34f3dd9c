"""Arguments and iteration of a torch_dist checkpoint. They are in `common.pt`, or since megatron-core 0.19 in an object
stored among the tensors."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import torch

from slimx.json_types import Json
from slimx.models.files import torch_dist
from slimx.models.files.safe_pickle import read_metadata, safe_classes

_OBJECT = "common_state/shard_0_1"
"""Key under which checkpoints without a `common.pt` store its contents, as the only element of a list."""


def read_common(path: Path) -> Json:
    """Reads Megatron's arguments and the iteration from the torch_dist checkpoint `path`. argparse.Namespace, the class
    of the arguments, is the only class that may be unpickled."""
    data = None if (path / "common.pt").is_file() else read_object(path, _OBJECT)
    if data is None:
        return torch_dist.read_common(path)
    with safe_classes(argparse.Namespace):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)[0]


def saved_vocabulary(path: Path) -> int | None:
    """Reads the size of the model's vocabulary without padding, `args.vocab_size`, from the torch_dist checkpoint
    `path`. Returns None if the arguments lack it, or contain classes that must not be unpickled."""
    try:
        vocabulary = getattr(read_common(path)["args"], "vocab_size", None)
    # The arguments of other systems may contain any class, and a damaged file may raise almost any exception.
    except Exception:
        return None
    return vocabulary if isinstance(vocabulary, int) else None


def read_object(directory: Path, key: str) -> bytes | None:
    """Returns the bytes of the object `key` of a torch_dist checkpoint, as torch.save wrote them; None if there is no
    such object."""
    for index, place in read_metadata(directory / ".metadata").storage_data.items():
        if index.fqn == key:
            with (directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                return file.read(place.length)
    return None
