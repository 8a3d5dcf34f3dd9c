"""Reads Hugging Face tensors out of a torch_dist checkpoint, whatever layout saved it, without loading whole files.

Pieces of tensors are found by the checkpoint's metadata and read from mapped files. No byte is run as code: see
`slimx.models.files.safe_pickle`, and torch's `weights_only`.
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

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from slimx.errors import SlimxError
from slimx.extras.convert.sources import Scratch, Shape
from slimx.extras.megatron_files.directory import TensorPlace, check_fit, places
from slimx.layout.maps import Rect
from slimx.layout.table import Table
from slimx.models.files.reader import check_finite
from slimx.models.files.safe_pickle import read_metadata
from slimx.reshard.plan.intersect import Move, moves

_DTYPES = torch.bfloat16, torch.float32, torch.float16
_HEADERS = threading.Lock()
"""Torch reads a header with a mode switched on."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A saved piece of a tensor: where it begins in the tensor, its shape, and its place in a file."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


class TorchDistReader:
    """Tensors of a checkpoint of Megatron-LM by their Hugging Face names."""

    def __init__(self, path: Path, table: Table):
        """Raises SlimxError if the checkpoint does not fit `table`, or if a file is missing or truncated."""
        fit = check_fit(path, table)
        self.path = fit.path
        metadata = read_metadata(self.path / ".metadata")
        self._holders: dict[str, list[tuple[TensorPlace, Rect]]] = defaultdict(list)
        for place in places(table, per_layer=fit.per_layer):
            place = replace(place, key=fit.keys.get(place.key, place.key), centred=place.key in fit.centred)
            for rect in place.part.rects:
                self._holders[place.part.sources[rect.source]].append((place, rect))
        stacked = {place.key: len(place.index) for held in self._holders.values() for place, _ in held}
        self._dtypes = {key: metadata.state_dict_metadata[key].properties.dtype for key in stacked}
        for key, dtype in self._dtypes.items():
            if dtype not in _DTYPES:
                raise SlimxError(
                    f"{self.path}: tensor {key} is saved as {dtype}, which slimx does not read; save it in bf16",
                    code="megatron.dtype",
                    about=key,
                )
        self._stored = {key: _Pieces(self.path, key, count, metadata) for key, count in stacked.items()}
        self._check_files()
        self._files: dict[str, torch.Tensor] = {}
        self._out = Scratch()
        self._headers: dict[_Stored, tuple[int, int]] = {}
        """First byte in its file and size of a piece's data; -1: not in the order of its elements."""

    def _check_files(self) -> None:
        ends: dict[str, int] = defaultdict(int)
        for pieces in self._stored.values():
            for piece in pieces.all:
                ends[piece.file] = max(ends[piece.file], piece.start + piece.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise _damaged(self.path, name, "is missing, but .metadata names it")
            if (size := file.stat().st_size) < end:
                raise _damaged(self.path, name, f"is truncated: {size} bytes, .metadata wants {end}")

    @property
    def names(self) -> Collection[str]:
        """Every tensor of the model."""
        return self._holders.keys()

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which tensor `name` was saved; fp32 of one of `centred`."""
        return torch.float32 if name in self.centred else self._dtypes[self._holders[name][0][0].key]

    @cached_property
    def centred(self) -> frozenset[str]:
        """Norms whose factors were saved less 1, and are computed in fp32, as megatron-core does."""
        return frozenset(name for name, [(place, _), *_] in self._holders.items() if place.centred)

    def reopened(self) -> TorchDistReader:
        """The same with no file mapped."""
        other = copy(self)
        other._files, other._out = {}, Scratch()
        return other

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """The elements of tensor `name` that `rect`, which does not step, takes, until the next call."""
        holders = self._holders[name]
        out = self._out.tensor((rect.rows, rect.cols), self._dtypes[holders[0][0].key])
        for move in moves([held for _, held in holders], rect._replace(local_row=0, local_col=0), name):
            self._fill(out, holders[move.source][0], move)
        check_finite(out, name, self.path)
        return out.float() + 1 if name in self.centred else out

    def _fill(self, out: torch.Tensor, place: TensorPlace, move: Move) -> None:
        """Copy what `move` takes of the tensor at `place`, from all pieces that hold some of it."""
        view = out[move.row :: move.row_step, move.col : move.col + move.cols][: move.rows]
        step, filled = move.source_step, 0
        for piece in self._stored[place.key].of(place.index):
            (top, left), (high, wide) = _extent(piece, len(place.index))
            first = max(0, -(-(top - move.source_row) // step))
            last = min(view.shape[0], (top + high - 1 - move.source_row) // step + 1)
            start, stop = max(0, left - move.source_col), min(view.shape[1], left + wide - move.source_col)
            if first >= last or start >= stop:
                continue
            rows = self._bytes(piece, place.index, out.dtype)[move.source_row + first * step - top :: step][
                : last - first
            ]
            begin = (move.source_col + start - left) * out.itemsize
            # Bytes are copied: saved tensors begin anywhere in a file, not where their dtype would have them.
            held = rows[:, begin : begin + (stop - start) * out.itemsize]
            view[first:last, start:stop].view(torch.uint8).copy_(held)
            filled += (last - first) * (stop - start)
        if filled != view.numel():
            raise _incomplete(self.path, place.key, f"at {list(place.index)}: {filled} of {view.numel()} elements")

    def _bytes(self, piece: _Stored, index: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The matrix of `piece` that stands at `index` in the whole tensor, uint8 [rows, bytes of a row]."""
        if piece.file not in self._files:
            path = self.path / piece.file
            self._files[piece.file] = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        number = 0
        for at, first, count in zip(index, piece.offsets, piece.sizes, strict=False):
            number = number * count + at - first
        data = self._data(piece, dtype)
        _, (rows, cols) = _extent(piece, len(index))
        return data.view(-1, rows, data.numel() // (prod(piece.sizes) // cols))[number]

    def _data(self, piece: _Stored, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of a saved piece of a tensor of `dtype`, in the order of its elements."""
        mapped = self._files[piece.file]
        if (at := self._headers.get(piece)) is None:
            with _HEADERS, FakeTensorMode():
                found = _load(self.path, piece)
            storage = found.untyped_storage()
            if tuple(found.shape) != piece.sizes:
                what = f"holds a tensor {list(found.shape)} where .metadata has {list(piece.sizes)}"
                raise _damaged(self.path, piece.file, what)
            start = piece.start + storage._checkpoint_offset + found.storage_offset() * found.itemsize
            if found.dtype != dtype:
                what = f"holds a tensor of {found.dtype} where .metadata has {dtype}"
                raise _damaged(self.path, piece.file, what, code="megatron.dtype")
            at = self._headers[piece] = (start, found.numel() * found.itemsize) if found.is_contiguous() else (-1, 0)
        start, size = at
        if start >= 0:
            return mapped[start : start + size]
        return _load(self.path, piece).contiguous().view(-1).view(torch.uint8)


def read_whole(path: Path, key: str, metadata: Metadata) -> torch.Tensor:
    """A copy of the tensor `key` of the checkpoint in `path`, whose pieces `metadata` describes: for one that fits into
    memory and is in no weight table. No byte is run as code."""
    described = metadata.state_dict_metadata[key]
    out = torch.empty(described.size, dtype=described.properties.dtype)
    filled = 0
    for piece in (_stored(path, key, chunk, metadata) for chunk in described.chunks):
        target = out[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]
        target.copy_(_load(path, piece))
        filled += target.numel()
    if filled != out.numel():
        raise _incomplete(path, key, f"{filled} of {out.numel()} elements")
    return out


def _load(path: Path, piece: _Stored) -> torch.Tensor:
    try:
        with (path / piece.file).open("rb") as file:
            view = _create_file_view(file, piece.start, piece.length)
            return torch.load(view, map_location="cpu", weights_only=True)
    # A damaged file raises nearly anything.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise _damaged(path, piece.file, f"damaged at byte {piece.start} ({reason})") from error


def _damaged(path: Path, file: str, what: str, code: str = "megatron.file") -> SlimxError:
    return SlimxError(f"{path / file}: {what}; restore the file from its source", code=code, about=file)


def _incomplete(path: Path, key: str, what: str) -> SlimxError:
    return SlimxError(
        f"{path}: tensor {key} is not whole in it ({what}); save it again", code="megatron.incomplete", about=key
    )


class _Pieces:
    """The saved pieces of the tensor with one key, whose first `stacked` axes stack matrices."""

    def __init__(self, path: Path, key: str, stacked: int, metadata: Metadata):
        described = metadata.state_dict_metadata[key]
        self.all = [_stored(path, key, chunk, metadata) for chunk in described.chunks]
        self._by_index: dict[Shape, list[_Stored]] = defaultdict(list)
        """Those that lie in one matrix, by its index."""
        self._others: list[_Stored] = []
        for piece in self.all:
            single = all(size == 1 for size in piece.sizes[:stacked])
            (self._by_index[piece.offsets[:stacked]] if single else self._others).append(piece)

    def of(self, index: Shape) -> list[_Stored]:
        """Pieces that hold some of the matrix at `index`."""
        wide = [
            piece
            for piece in self._others
            if all(o <= at < o + n for at, o, n in zip(index, piece.offsets, piece.sizes, strict=False))
        ]
        return self._by_index.get(index, []) + wide


def _stored(path: Path, key: str, chunk: ChunkStorageMetadata, metadata: Metadata) -> _Stored:
    found = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
    if found is None:
        raise SlimxError(
            f"{path / '.metadata'}: does not say where {key} at {list(chunk.offsets)} is; save it again",
            code="megatron.metadata",
            about=key,
        )
    if getattr(found, "transform_descriptors", None):
        raise SlimxError(
            f"{path}: tensor {key} is compressed; save it again without extensions",
        )
    return _Stored(tuple(chunk.offsets), tuple(chunk.sizes), found.relative_path, found.offset, found.length)


def _extent(piece: _Stored, stacked: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First row and column, and rows and columns, behind the axes that stack matrices; a vector is one column. Axes in
    between are of length 1."""
    row, *beyond = piece.offsets[stacked:]
    rows, *wide = piece.sizes[stacked:]
    return (row, beyond[-1] if beyond else 0), (rows, wide[-1] if wide else 1)
