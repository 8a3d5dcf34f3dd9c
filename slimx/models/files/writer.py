"""Writes gathered buckets as a Hugging Face directory: one safetensors shard per bucket, an index, config and
tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slimx.layout.table import Table
from slimx.models.fields import without_quantisation
from slimx.models.files.reader import CheckpointReader

_SHARD_BYTES = 4 * 2**30
"""Bytes of carried-over tensors in one file, and in memory at once."""
# Everything that is not a tensor is copied from the directory the run started from.
TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class Packed(Protocol):
    """A packed bucket in shared memory (`slimx.reshard.packed.PackedBucket`)."""

    path: str
    size: int
    tensors: Sequence[Any]


def write_bucket(packed: Packed, path: str, table: Table) -> list[str]:
    """Write the tensors of `packed`, some of `table`'s, into the safetensors file `path`; returns their names."""
    memory = torch.from_file(packed.path, shared=True, size=packed.size, dtype=torch.uint8)
    turned, tensors = table.turned(), {}
    for t in packed.tensors:
        tensor = memory[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape)
        # `checkpoint_parts` brings the matrices of such a stack as the table names them.
        tensors[t.name] = tensor.transpose(-2, -1).contiguous() if t.name in turned else tensor
    return _write(Path(path), tensors)


def finish_directory(
    directory: Path, source: Path, table: Table, shards: Sequence[Sequence[str]], *, weights: Path | None
) -> None:
    """Complete an export into `directory`: what the trainer does not hold, index, config and tokenizer of `source`.

    `shards[i]` names the tensors of file `shard_name(i, len(shards))`. Aliases and frozen tensors of `table` are
    written if the checkpoint `weights` has them: the first with their original's new bytes, the second with their own.
    None: neither is.
    """
    weight_map = {tensor: shard_name(i, len(shards)) for i, tensors in enumerate(shards) for tensor in tensors}
    reader = CheckpointReader(weights) if weights is not None else None
    for number, names in enumerate(_carried(reader, table) if reader is not None else ()):
        file = f"model-carried-{number + 1:05d}.safetensors"
        tensors = {}
        for name in names:
            if name in table.aliases:
                original = table.aliases[name]
                with safe_open(directory / weight_map[original], framework="pt") as trained:
                    tensors[name] = trained.get_tensor(original)
            else:
                tensors[name] = reader.whole(name)
        weight_map |= dict.fromkeys(_write(directory / file, tensors), file)
    total = sum(os.path.getsize(directory / file) for file in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(TENSOR_SUFFIXES):
            shutil.copy2(file, directory / file.name)
    config = directory / "config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    if (plain := without_quantisation(fields)) != fields:  # what is exported is in the trainer's dtype
        config.write_text(json.dumps(plain, indent=2) + "\n")


def _carried(reader: CheckpointReader, table: Table) -> Iterator[list[str]]:
    """Names of the tensors that the export takes over, in portions of bounded size."""
    portion: list[str] = []
    size = 0
    for name in [*table.aliases, *table.frozen, *reader.buffers]:
        if name in reader.names:
            portion.append(name)
            size += reader.nbytes(name)
            if size > _SHARD_BYTES:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return list(tensors)


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
