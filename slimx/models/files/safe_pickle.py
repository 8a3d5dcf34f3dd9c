"""Reads what torch_dist checkpoints keep as pickles, without letting a pickle choose what is called.

A checkpoint may come from anywhere, and unpickling runs whatever the file names. Here only the plain record classes of
torch's checkpoint format are let through; any other name is refused with a sentence that gives it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from slimx.errors import SlimxError

_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # Of torch before 2.3.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    # Save plans, which megatron-core keeps in the metadata when it caches them.
    *((_PLANNER, name) for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.startswith("megatron.") and (module, name) in _ALLOWED:
            return _Empty
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint")


class _Empty:
    """Stands for records of megatron-core that are not read."""


@contextmanager
def safe_classes(*classes: type) -> Iterator[None]:
    """Lets torch's `weights_only` read `classes`, and afterwards what it read before: torch's own context manager takes
    them out also if they were in before, as Namespace and BytesIO are once megatron-core is imported."""
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([one for one in classes if one not in known]):
        yield


def read_metadata(path: Path) -> Metadata:
    """The tensors of a torch_dist checkpoint: `path` is its `.metadata`. Raises SlimxError naming the file."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except OSError as error:
        raise SlimxError(
            f"{path}: cannot be read ({error.strerror}); restore the file", code="megatron.metadata", about=str(path)
        ) from error
    # A damaged pickle raises nearly anything.
    except Exception as error:
        raise _no_metadata(path, " ".join(str(error).split())) from error
    if (problem := _problem(found)) is not None:
        raise _no_metadata(path, problem)
    return found


def _no_metadata(path: Path, reason: str) -> SlimxError:
    return SlimxError(
        f"{path}: not the metadata of a torch_dist checkpoint ({reason}); restore the file from its source",
        code="megatron.metadata",
        about=str(path),
    )


def _problem(found: Any) -> str | None:
    """Description of something in `found` that no writer of checkpoints writes; None if all is as it should be. Classes
    are let in, but any of them may hold anything."""
    if not isinstance(found, Metadata):
        return f"it holds a {type(found).__name__}"
    tensors, places = found.state_dict_metadata, found.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        return "it lacks tensors, or their places"
    for key, value in tensors.items():
        whole = isinstance(value, BytesStorageMetadata) or (
            isinstance(value, TensorStorageMetadata) and _is_tensor(value)
        )
        if not isinstance(key, str) or not whole:
            return f"it does not describe {key} as a tensor"
    for index, place in places.items():
        if not isinstance(index, MetadataIndex) or not _is_place(place):
            return f"it does not say which bytes of which file beside it {getattr(index, 'fqn', index)} is"
    return None


def _is_tensor(value: TensorStorageMetadata) -> bool:
    if not _are_sizes(value.size) or not isinstance(value.chunks, list):
        return False
    dtype = getattr(value.properties, "dtype", None)
    return isinstance(dtype, torch.dtype) and all(_is_inside(chunk, value.size) for chunk in value.chunks)


def _is_inside(chunk: Any, size: torch.Size) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not _are_sizes(chunk.offsets) or not _are_sizes(chunk.sizes):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(at + count <= length for at, count, length in zip(chunk.offsets, chunk.sizes, size, strict=True))


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and all(isinstance(size, int) and size >= 0 for size in sizes)


def _is_place(place: Any) -> bool:
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    return Path(place.relative_path).name == place.relative_path and _are_sizes((place.offset, place.length))
