"""Writes gathered buckets as a Hugging Face directory: one safetensors shard per bucket, an index, config and
tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

# Everything that is not a tensor is copied from the directory the run started from.
_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class Packed(Protocol):
    """A packed bucket in shared memory (`slimx.reshard.gather.PackedBucket`)."""

    path: str
    size: int
    tensors: Sequence[Any]


def write_bucket(packed: Packed, path: str) -> list[str]:
    """Write the tensors of `packed` into the safetensors file `path`; returns their names."""
    memory = torch.from_file(packed.path, shared=True, size=packed.size, dtype=torch.uint8)
    tensors = {
        t.name: memory[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape)
        for t in packed.tensors
    }
    save_file(tensors, path, metadata={"format": "pt"})
    with open(path, "rb") as written:
        os.fsync(written.fileno())
    return list(tensors)


def finish_directory(directory: Path, source: Path, shards: Sequence[Sequence[str]], name: str) -> None:
    """Add index, config and tokenizer of `source` to `directory`; `shards[i]` names the tensors of file
    `shard_name(name, i, n)`."""
    weight_map = {tensor: shard_name(name, i, len(shards)) for i, tensors in enumerate(shards) for tensor in tensors}
    total = sum(os.path.getsize(directory / shard_name(name, i, len(shards))) for i in range(len(shards)))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_TENSOR_SUFFIXES):
            shutil.copy2(file, directory / file.name)


def shard_name(name: str, index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`."""
    return f"{name}-{index + 1:05d}-of-{count:05d}.safetensors"
