"""Reads what torch_dist checkpoints keep as pickles, without letting a pickle choose what is called.

A checkpoint may come from anywhere, and unpickling runs whatever the file names. Here only the plain record classes of
torch's checkpoint format are let through; any other name is refused with a sentence that gives it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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


def read_metadata(path: Path) -> Metadata:
    """The tensors of a torch_dist checkpoint: `path` is its `.metadata`. Raises SlimxError naming the file."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except OSError as error:
        raise SlimxError(f"{path}: cannot be read ({error.strerror}); restore the file") from error
    # A damaged pickle raises nearly anything.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise SlimxError(
            f"{path}: not the metadata of a torch_dist checkpoint ({reason}); restore the file from its source"
        ) from error
    if not isinstance(found, Metadata):
        raise SlimxError(f"{path}: holds a {type(found).__name__}, not the metadata of a torch_dist checkpoint")
    return found
