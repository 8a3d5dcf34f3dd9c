"""Reads tensors by their Hugging Face names from a torch_dist checkpoint, saved under any layout, without loading
complete files.

The checkpoint's metadata locates pieces of tensors, which are read from memory-mapped files. Code in the checkpoint is
never executed, because metadata is read with `slimx.models.files.safe_pickle`, and tensors with torch's `weights_only`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from slimx.errors import SlimxError, one_line
from slimx.extras.convert.sources import Scratch, Shape
from slimx.extras.megatron_files.directory import TensorLocation, check_fit, locations
from slimx.layout.maps import Rect
from slimx.layout.table import Table
from slimx.models.files.reader import check_finite
from slimx.models.files.safe_pickle import read_metadata
from slimx.reshard.plan.intersect import Move, moves

_DTYPES = torch.bfloat16, torch.float32, torch.float16
_HEADERS = threading.Lock()
"""Lock for reading the header of a piece, because reading a header sets a process-wide mode of torch."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Saved piece of a tensor: its offsets in the tensor, its shape, and its location in a file."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


class TorchDistReader:
    """Reader of the tensors of a Megatron-LM checkpoint by their Hugging Face names."""

    def __init__(self, path: Path, table: Table, *, bridge: Table | None = None):
        """Opens the checkpoint in `path`. `table`: weight table of the model; `bridge`: that of Megatron-Bridge's
        checkpoints, if it differs. Raises SlimxError if the checkpoint matches neither, or if a file is missing or
        truncated."""
        fit = check_fit(path, table, bridge=bridge)
        self.path = fit.path
        metadata = read_metadata(self.path / ".metadata")
        self._holders: dict[str, list[tuple[TensorLocation, Rect]]] = defaultdict(list)
        for location in locations(fit.table, per_layer=fit.per_layer):
            location = replace(
                location, key=fit.keys.get(location.key, location.key), centered=location.key in fit.centered
            )
            for rect in location.part.rects:
                self._holders[location.part.sources[rect.source]].append((location, rect))
        stacked = {}
        for pairs in self._holders.values():
            for location, _ in pairs:
                stacked[location.key] = len(location.index)
        self._dtypes = {}
        for key in stacked:
            dtype = _entry(metadata, key).properties.dtype
            if dtype not in _DTYPES:
                raise SlimxError(
                    f"{self.path}: tensor {key} has dtype {dtype}, which slimx does not support; save the checkpoint "
                    "again with this tensor in bf16",
                    code="megatron.dtype",
                    about=key,
                )
            self._dtypes[key] = dtype
        self._stored = {key: _Pieces(self.path, key, count, metadata) for key, count in stacked.items()}
        self._check_files()
        self._files: dict[str, torch.Tensor] = {}
        self._out = Scratch()
        self._headers: dict[_Stored, tuple[int, int]] = {}
        """For each piece, the position of its data in the file and their size in bytes; the position is -1 if the data
        are not contiguous."""

    def _check_files(self) -> None:
        ends: dict[str, int] = defaultdict(int)
        for pieces in self._stored.values():
            for piece in pieces.all:
                ends[piece.file] = max(ends[piece.file], piece.start + piece.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise _damaged(self.path, name, "the file is missing, although .metadata refers to the file")
            size = file.stat().st_size
            if size < end:
                raise _damaged(self.path, name, f"the file has {size} bytes, but .metadata requires {end}")

    @property
    def names(self) -> Collection[str]:
        """Hugging Face names of all tensors of the model."""
        return self._holders.keys()

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which tensor `name` was saved; fp32 for tensors in `centered`."""
        return torch.float32 if name in self.centered else self._dtypes[self._holders[name][0][0].key]

    @cached_property
    def centered(self) -> frozenset[str]:
        """Names of norm weights that the checkpoint stores with 1 subtracted. `read` adds 1 in fp32, as megatron-core
        does."""
        names = set()
        for name, holders in self._holders.items():
            first, _ = holders[0]
            if first.centered:
                names.add(name)
        return frozenset(names)

    def reopened(self) -> TorchDistReader:
        """Returns a copy of the reader that has no file mapped."""
        other = copy(self)
        other._files = {}
        other._out = Scratch()
        return other

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Reads the elements `rect` of tensor `name`, [rect.rows, rect.cols]. The step of `rect` must be 1. The result
        is valid until the next call."""
        holders = self._holders[name]
        out = self._out.tensor((rect.rows, rect.cols), self._dtypes[holders[0][0].key])
        rects = [source for _, source in holders]
        for move in moves(rects, rect._replace(local_row=0, local_col=0), name):
            self._fill(out, holders[move.source][0], move)
        check_finite(out, name, self.path)
        return out.float() + 1 if name in self.centered else out

    def _fill(self, out: torch.Tensor, location: TensorLocation, move: Move) -> None:
        """Copies the part `move` of the tensor at `location` to `out`, from all pieces that overlap it."""
        view = out[move.row :: move.row_step, move.col : move.col + move.cols][: move.rows]
        step = move.source_step
        filled = 0
        for piece in self._stored[location.key].overlapping(location.index):
            (top, left), (high, wide) = _extent(piece, len(location.index))
            first = max(0, -(-(top - move.source_row) // step))
            last = min(view.shape[0], (top + high - 1 - move.source_row) // step + 1)
            start = max(0, left - move.source_col)
            stop = min(view.shape[1], left + wide - move.source_col)
            if first >= last or start >= stop:
                continue
            rows = self._bytes(piece, location.index, out.dtype)[move.source_row + first * step - top :: step]
            begin = (move.source_col + start - left) * out.itemsize
            # Bytes are copied, because saved tensors are not aligned to their dtype in a file.
            part = rows[: last - first, begin : begin + (stop - start) * out.itemsize]
            view[first:last, start:stop].view(torch.uint8).copy_(part)
            filled += (last - first) * (stop - start)
        if filled != view.numel():
            raise _incomplete(self.path, location.key, f"{filled} of {view.numel()} elements at {list(location.index)}")

    def _bytes(self, piece: _Stored, index: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Returns from `piece` the matrix at `index` of the full tensor, as uint8 [rows, bytes per row]."""
        if piece.file not in self._files:
            path = self.path / piece.file
            self._files[piece.file] = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        matrix = 0
        for position, first, count in zip(index, piece.offsets, piece.sizes, strict=False):
            matrix = matrix * count + position - first
        data = self._data(piece, dtype)
        _, (rows, cols) = _extent(piece, len(index))
        return data.view(-1, rows, data.numel() // (prod(piece.sizes) // cols))[matrix]

    def _data(self, piece: _Stored, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes of `piece`, a saved piece of a tensor of `dtype`, in element order."""
        mapped = self._files[piece.file]
        if piece not in self._headers:
            self._headers[piece] = self._header(piece, dtype)
        start, size = self._headers[piece]
        if start >= 0:
            return mapped[start : start + size]
        return _load(self.path, piece).contiguous().view(-1).view(torch.uint8)

    def _header(self, piece: _Stored, dtype: torch.dtype) -> tuple[int, int]:
        with _HEADERS, FakeTensorMode():
            tensor = _load(self.path, piece)
        if tuple(tensor.shape) != piece.sizes:
            problem = f"the file has a tensor of shape {list(tensor.shape)}, but .metadata declares {list(piece.sizes)}"
            raise _damaged(self.path, piece.file, problem)
        if tensor.dtype != dtype:
            problem = f"the file has a tensor of {tensor.dtype}, but .metadata declares {dtype}"
            raise _damaged(self.path, piece.file, problem, code="megatron.dtype")
        if not tensor.is_contiguous():
            return -1, 0
        offset = tensor.untyped_storage()._checkpoint_offset
        assert offset is not None
        return piece.start + offset + int(tensor.storage_offset()) * tensor.itemsize, tensor.numel() * tensor.itemsize


def read_whole(path: Path, key: str, metadata: Metadata) -> torch.Tensor:
    """Returns a copy of the tensor `key` of the checkpoint in `path`. This function is for tensors that fit into memory
    and are not in any weight table. `metadata`: metadata of the checkpoint. Executes no code from the checkpoint."""
    entry = _entry(metadata, key)
    out = torch.empty(entry.size, dtype=entry.properties.dtype)
    filled = 0
    for chunk in entry.chunks:
        piece = _stored(path, key, chunk, metadata)
        target = out[tuple(slice(start, start + n) for start, n in zip(piece.offsets, piece.sizes, strict=True))]
        target.copy_(_load(path, piece))
        filled += target.numel()
    if filled != out.numel():
        raise _incomplete(path, key, f"{filled} of {out.numel()} elements")
    return out


def _entry(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _load(path: Path, piece: _Stored) -> torch.Tensor:
    try:
        with (path / piece.file).open("rb") as file:
            # The view has the methods of a file.
            view = cast("IO[bytes]", _create_file_view(file, piece.start, piece.length))
            return torch.load(view, map_location="cpu", weights_only=True)
    # A damaged file may raise almost any exception.
    except Exception as error:
        reason = one_line(error)
        raise _damaged(path, piece.file, f"the file is damaged at byte {piece.start} ({reason})") from error


def _damaged(path: Path, file: str, problem: str, code: str = "megatron.file") -> SlimxError:
    return SlimxError(
        f"{path / file}: {problem}; copy the file again from the original checkpoint", code=code, about=file
    )


def _incomplete(path: Path, key: str, problem: str) -> SlimxError:
    return SlimxError(
        f"{path}: tensor {key} is incomplete ({problem}); save the checkpoint again",
        code="megatron.incomplete",
        about=key,
    )


class _Pieces:
    """Saved pieces of the tensor stored under `key`. The tensor's first `stacked` axes are those along which matrices
    are stacked."""

    def __init__(self, path: Path, key: str, stacked: int, metadata: Metadata):
        self.all = [_stored(path, key, chunk, metadata) for chunk in _entry(metadata, key).chunks]
        self._by_index: dict[Shape, list[_Stored]] = defaultdict(list)
        """For each index of a matrix, the pieces that are within this matrix."""
        self._others: list[_Stored] = []
        for piece in self.all:
            single = all(size == 1 for size in piece.sizes[:stacked])
            (self._by_index[piece.offsets[:stacked]] if single else self._others).append(piece)

    def overlapping(self, index: Shape) -> list[_Stored]:
        """Returns the pieces that contain a part of the matrix at `index`."""
        pieces = list(self._by_index.get(index, ()))
        for piece in self._others:
            if _covers(piece, index):
                pieces.append(piece)
        return pieces


def _covers(piece: _Stored, index: Shape) -> bool:
    axes = zip(index, piece.offsets, piece.sizes, strict=False)
    return all(start <= position < start + count for position, start, count in axes)


def _stored(path: Path, key: str, chunk: ChunkStorageMetadata, metadata: Metadata) -> _Stored:
    storage = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
    if storage is None:
        raise SlimxError(
            f"{path / '.metadata'} has no storage entry for tensor {key} at offsets {list(chunk.offsets)}; save "
            "the checkpoint again",
            code="megatron.metadata",
            about=key,
        )
    if getattr(storage, "transform_descriptors", None):
        raise SlimxError(
            f"{path}: tensor {key} is compressed, which slimx does not support; save it without compression",
        )
    return _Stored(tuple(chunk.offsets), tuple(chunk.sizes), storage.relative_path, storage.offset, storage.length)


def _extent(piece: _Stored, stacked: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (first row, first column) of a piece, and (number of rows, number of columns). The first `stacked` axes,
    along which matrices are stacked, are skipped. A vector has one column. Axes between the first and the last count as
    rows; no piece divides them."""
    row, *inner_offsets = piece.offsets[stacked:]
    rows, *inner_sizes = piece.sizes[stacked:]
    if not inner_sizes:
        return (row, 0), (rows, 1)
    *inner, cols = inner_sizes
    return (row * prod(inner), inner_offsets[-1]), (rows * prod(inner), cols)
