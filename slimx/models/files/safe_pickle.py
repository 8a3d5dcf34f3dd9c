"""Reads the pickles of torch_dist checkpoints without executing code that a pickle names.

Unpickling calls any class or function that the file names, and a checkpoint may come from anyone. Only the plain record
classes of torch's checkpoint format are allowed; any other name is refused, in an error that contains the name."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from slimx.errors import SlimxError, one_line

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
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
    # names in torch before 2.3
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    # save plans, which megatron-core stores in the metadata when it caches them
    *((_PLANNER, name) for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("megatron.") and (module, name) in _ALLOWED:
            return _Empty
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed in a checkpoint")


class _Empty:
    """Placeholder for megatron-core's record classes, whose contents are not used."""


@contextmanager
def safe_classes(*classes: type) -> Iterator[None]:
    """Allows torch.load(weights_only=True) to unpickle `classes` inside the block, and restores the previous state
    afterwards. torch's own context manager would also remove classes that were allowed before, as Namespace and BytesIO
    are once megatron-core has been imported.
    """
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([kind for kind in classes if kind not in known]):
        yield


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata of a torch_dist checkpoint: shapes, dtypes and locations of its tensors. `path`: the
    checkpoint's `.metadata` file. Raises SlimxError, which names the file, if it cannot be read or is not valid."""
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except OSError as error:
        raise SlimxError(
            f"{path}: the file cannot be read ({error.strerror}); restore the file from its source",
            code="megatron.metadata",
            about=str(path),
        ) from error
    # A damaged pickle may raise nearly any exception.
    except Exception as error:
        raise _no_metadata(path, one_line(error)) from error
    problem = _problem(metadata)
    if problem is not None:
        raise _no_metadata(path, problem)
    return metadata


def _no_metadata(path: Path, reason: str) -> SlimxError:
    return SlimxError(
        f"{path}: the file is not the metadata of a torch_dist checkpoint ({reason}); restore the file from its source",
        code="megatron.metadata",
        about=str(path),
    )


def _problem(metadata: object) -> str | None:
    """Returns a description, for an error message, of the first content that no checkpoint writer would produce; None
    if everything is valid. Unpickling restricts classes, but not the values of their fields."""
    if not isinstance(metadata, Metadata):
        return f"it contains a {type(metadata).__name__}"
    tensors = metadata.state_dict_metadata
    locations = metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(locations, dict):
        return "it lacks tensors or their locations"
    for key, value in tensors.items():
        if not isinstance(key, str) or not _is_value(value):
            return f"it does not describe {key} as a tensor"
    for index, location in locations.items():
        if not isinstance(index, MetadataIndex) or not _is_location(location):
            return f"it gives no file and byte range of {getattr(index, 'fqn', index)}"
    return None


def _is_value(value: object) -> bool:
    if isinstance(value, TensorStorageMetadata):
        return _is_tensor(value)
    return isinstance(value, BytesStorageMetadata)


def _is_tensor(value: TensorStorageMetadata) -> bool:
    if not _are_sizes(value.size) or not isinstance(value.chunks, list):
        return False
    dtype = getattr(value.properties, "dtype", None)
    return isinstance(dtype, torch.dtype) and all(_is_inside(chunk, value.size) for chunk in value.chunks)


def _is_inside(chunk: object, size: torch.Size) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not _are_sizes(chunk.offsets) or not _are_sizes(chunk.sizes):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(start + count <= length for start, count, length in zip(chunk.offsets, chunk.sizes, size, strict=True))


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, tuple) and all(isinstance(size, int) and size >= 0 for size in sizes)


def _is_location(location: object) -> bool:
    if not isinstance(location, _StorageInfo) or not isinstance(location.relative_path, str):
        return False
    name = Path(location.relative_path).name
    return name == location.relative_path and _are_sizes((location.offset, location.length))
