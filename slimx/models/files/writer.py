"""Writes an export of a trainer's weights as a Hugging Face directory: one safetensors file per bucket of gathered
tensors, the index, and the configuration and tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slimx.layout.table import Table
from slimx.models.fields import without_quantization
from slimx.models.files.reader import CheckpointReader

_SHARD_BYTES = 4 * 2**30
"""Size in bytes at which a file of copied tensors is complete and the next file begins. It is limited because all
tensors of a file are in memory at the same time."""
# Files with these suffixes are not copied from the directory from which the run started; all others are.
TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class TensorInBucket(Protocol):
    """Type and location of one tensor in a packed bucket. `offset`: position of the tensor's first byte in the
    bucket."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Packed(Protocol):
    """A bucket of tensors packed into shared memory at `path` (`slimx.reshard.packed.PackedBucket`)."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def tensors(self) -> Sequence[TensorInBucket]: ...


def write_bucket(packed: Packed, path: str, table: Table) -> list[str]:
    """Writes the tensors in the bucket `packed` to the safetensors file `path`; returns their names. `table`: weight
    table, which identifies the tensors that are stacks of transposed matrices."""
    memory = torch.from_file(packed.path, shared=True, size=packed.size, dtype=torch.uint8)
    transposed = table.transposed()
    tensors = {}
    for t in packed.tensors:
        tensor = memory[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape)
        # `checkpoint_parts` yields the matrices of a stack untransposed.
        tensors[t.name] = tensor.transpose(-2, -1).contiguous() if t.name in transposed else tensor
    return _write(Path(path), tensors)


def finish_directory(
    directory: Path, source: Path, table: Table, shards: Sequence[Sequence[str]], *, weights: Path | None
) -> None:
    """Completes an export in `directory`: adds tensors that the trainer does not store, the index, and the
    configuration and tokenizer files of `source`.

    `shards[i]`: names of the tensors in the file `shard_name(i, len(shards))`. `weights`: checkpoint from which frozen
    tensors of `table` are copied; None: no tensors are added. Aliases (tensors that repeat another one) in `weights`
    are written with the new values of their originals."""
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        weight_map |= dict.fromkeys(tensors, shard_name(i, len(shards)))
    if weights is not None:
        _copy_tensors(directory, CheckpointReader(weights), table, weight_map)
    total = sum(os.path.getsize(directory / file) for file in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(TENSOR_SUFFIXES):
            shutil.copy2(file, directory / file.name)
    config = directory / "config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    plain = without_quantization(fields)
    if plain != fields:  # exported tensors have the trainer's dtype instead
        config.write_text(json.dumps(plain, indent=2) + "\n")


def _copy_tensors(directory: Path, reader: CheckpointReader, table: Table, weight_map: dict[str, str]) -> None:
    """Copies the aliases, frozen tensors and buffers of `reader`'s checkpoint to further files in `directory`, and adds
    their file names to `weight_map`."""
    for index, names in enumerate(_carried(reader, table)):
        file = f"model-carried-{index + 1:05d}.safetensors"
        tensors = {}
        for name in names:
            if name in table.aliases:
                original = table.aliases[name]
                with safe_open(directory / weight_map[original], framework="pt") as trained:
                    tensors[name] = trained.get_tensor(original)
            else:
                tensors[name] = reader.whole(name)
        weight_map |= dict.fromkeys(_write(directory / file, tensors), file)


def _carried(reader: CheckpointReader, table: Table) -> Iterator[list[str]]:
    """Yields the names of the tensors that `_copy_tensors` writes, one list per file of about `_SHARD_BYTES`."""
    portion: list[str] = []
    size = 0
    for name in [*table.aliases, *table.frozen, *reader.buffers]:
        if name in reader.names:
            portion.append(name)
            size += reader.nbytes(name)
            if size > _SHARD_BYTES:
                yield portion
                portion = []
                size = 0
    if portion:
        yield portion


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return list(tensors)


def shard_name(index: int, count: int) -> str:
    """Returns the name of safetensors file `index`, counted from 0, of `count` files."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
