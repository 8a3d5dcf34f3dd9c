"""Plans and writes a Megatron directory: torch_dist files of the tensors of a weight table.

    OUT/latest_checkpointed_iteration.txt      "release"
    OUT/release/.metadata  metadata.json  common.pt  __RANK_N.distcp

The format is that of torch.distributed.checkpoint: a file is a sequence of tensors as `torch.save` writes them, and
`.metadata` locates them. The files are written here, one piece at a time, because torch's `FileSystemWriter.write_data`
keeps every tensor of a file in memory until the file is closed (torch 2.13), and megatron-core's save needs the
complete model.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from slimx.durable import write_synced
from slimx.errors import SlimxError
from slimx.extras.convert.compare import compare_copied, differs
from slimx.extras.convert.formats.torch_dist_reader import TorchDistReader, read_whole
from slimx.extras.convert.sources import BLOCK_BYTES, Advance, Reading, Shape, TensorSource
from slimx.extras.convert.target import ShardBox, Target
from slimx.extras.convert.work import Stream
from slimx.extras.megatron_files.directory import TensorLocation, locations
from slimx.json_types import Json
from slimx.layout.maps import Rect
from slimx.layout.parts import matrix
from slimx.models.families import ModelSpec
from slimx.models.files.reader import bits
from slimx.models.files.safe_pickle import read_metadata
from slimx.models.files.torch_dist import TRACKER, preloaded

FILE_BYTES = 5 * 10**8
"""Default size of a file in bytes. It is small, so that a rank does not wait long for its files if a thousand ranks
read at the same time; a model of 1 TB has 2,000 files."""
_RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rectangular part of a tensor, stored as a separate entry of a file."""

    location: TensorLocation
    box: ShardBox
    dtype: torch.dtype

    @property
    def offsets(self) -> Shape:
        """Position of the piece's first element in the full tensor."""
        return (*self.location.index, *self._trim(self.box.row, self.box.col, (0,) * len(self._inner)))

    @property
    def sizes(self) -> Shape:
        return (1,) * len(self.location.index) + self._trim(self.box.rows, self.box.cols, self._inner)

    @property
    def _inner(self) -> Shape:
        """Sizes of the axes between the first and the last, whose elements are rows of a `ShardBox`."""
        return self.location.part.shape[1:-1]

    @property
    def nbytes(self) -> int:
        return self.box.rows * self.box.cols * self.dtype.itemsize

    def _trim(self, row: int, col: int, inner: Shape) -> Shape:
        return (row,) if len(self.location.part.shape) == 1 else (row // prod(self._inner), *inner, col)

    def make(self, reading: Reading) -> torch.Tensor:
        """Computes the piece's values from the source, in the scratch memory of `reading`."""
        box = self.box
        part = self.location.part
        out = reading.scratch.tensor((box.rows, box.cols), self.dtype)
        for rect in part.rects:
            overlap = clip(rect, box)
            if overlap is not None:
                target = out[overlap.local_row :, overlap.local_col :][: overlap.rows, : overlap.cols]
                target.copy_(reading.read(part.sources[rect.source], overlap))
        return (out.sub_(1) if self.location.centered else out).view(self.sizes)


def _section_boxes(location: TensorLocation, boxes: Sequence[ShardBox]) -> Iterator[ShardBox]:
    """Yields the overlaps of `boxes` with the section of a tensor that is stored at `location`, with rows relative to
    this section. `boxes`: shards of the complete tensor."""
    rows, _ = matrix(location.part.shape)
    for box in boxes:
        top = max(box.row, location.first)
        end = min(box.row + box.rows, location.first + rows)
        if top < end:
            yield box._replace(row=top - location.first, rows=end - top)


def clip(rect: Rect, box: ShardBox) -> Rect | None:
    """Returns the part of `rect` inside `box`, with local offsets relative to `box`; None if they do not overlap."""
    top = max(rect.local_row, box.row)
    left = max(rect.local_col, box.col)
    rows = min(rect.local_row + rect.rows, box.row + box.rows) - top
    cols = min(rect.local_col + rect.cols, box.col + box.cols) - left
    if rows <= 0 or cols <= 0:
        return None
    row = rect.row + (top - rect.local_row) * rect.step
    col = rect.col + left - rect.local_col
    return Rect(rect.source, row, col, rows, cols, top - box.row, left - box.col, rect.step)


@dataclass(slots=True)
class TorchDistFile:
    """File in the torch_dist format that the conversion will write."""

    name: str
    source: TensorSource
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0

    def write(self, stream: Stream) -> list[list[int]]:
        """Writes the pieces, and returns the [position, length] of each in bytes."""
        reading = Reading(self.source)
        spans = []
        for piece in self.pieces:
            start = stream.tell()
            torch.save(piece.make(reading), cast("IO[bytes]", stream))  # torch.save only writes to it
            spans.append([start, stream.tell() - start])
        return spans


class ToMegatron:
    """Planned conversion of Hugging Face tensors to a Megatron-LM release."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        target: Target,
        *,
        dtype: torch.dtype | None,
        numbered: bool,
        file_bytes: int,
        origin: str,
    ):
        """Plans the files. `dtype`: dtype of the converted weights; None: each tensor as stored. `numbered`: True if
        every layer has separate keys, False if one key stacks the layers. `file_bytes`: approximate size of a file.
        `origin`: string that identifies the source's content."""
        self._file_bytes = file_bytes
        self._source = source
        self.spec = spec
        self.target = target
        self.numbered = numbered
        self._tensors: list[TensorLocation] = []
        for location in locations(spec.table, per_layer=numbered):
            self._tensors += _written(location)
        self._dtypes = _dtypes(self._tensors, source, dtype)
        self.files = self._plan(source)
        self.fingerprint = _fingerprint(f"hf-to-megatron {origin} {target}", self.files)

    def _plan(self, source: TensorSource) -> list[TorchDistFile]:
        """Plans the files that each rank will read. A rank's files are filled one after another, in the order of the
        weight table."""
        files: list[TorchDistFile] = []
        current: dict[int, TorchDistFile] = {}
        count: dict[int, int] = {}
        for location in self._tensors:
            for box in _section_boxes(location, self.target.boxes(location.entry)):
                rank = self.target.rank(location.entry, box.shard)
                for piece in _split(Piece(location, box, self._dtypes[location.key])):
                    file = current.get(rank)
                    if file is None or file.nbytes + piece.nbytes > self._file_bytes:
                        index = count.get(rank, 0)
                        count[rank] = index + 1
                        file = TorchDistFile(f"{_RELEASE}/__{rank}_{index}.distcp", source)
                        current[rank] = file
                        files.append(file)
                    file.pieces.append(piece)
                    file.nbytes += piece.nbytes
        return files

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Disables, while files are written, the checksums of `torch.save`, which take half of its time. `torch.load`
        ignores these checksums, and a conversion computes digests anyway."""
        before = get_crc32_options()
        set_crc32_options(False)
        try:
            yield
        finally:
            set_crc32_options(before)

    @property
    def small(self) -> Sequence[str]:
        """Names of the files that `finish` writes."""
        return (f"{_RELEASE}/.metadata", f"{_RELEASE}/common.pt", f"{_RELEASE}/metadata.json", TRACKER)

    def compare(self, directory: Path, advance: Advance) -> None:
        """Reads every tensor of the output as a conversion to Hugging Face would, and compares it with the source's.
        Raises SlimxError naming the first tensor that differs."""
        written = Reading(TorchDistReader(directory, self.spec.table))
        source = Reading(self._source)
        for location in self._tensors:
            if location.first:
                continue  # the sources were compared at the first section
            if location.centered:
                _compare_centered(location, source, directory / _RELEASE)
                continue
            for name, (_, shape) in zip(location.entry.sources, location.entry.row.sources, strict=True):
                compare_copied(name, shape, self._dtypes[location.key], source, written, advance)

    def finish(self, directory: Path, notes: Json) -> None:
        """Writes the files of `small` to `directory`: metadata, arguments, format and tracker. `notes`: for each file,
        the return value of `TorchDistFile.write`."""
        release = directory / _RELEASE
        write_synced(release / ".metadata", pickle.dumps(self._metadata(notes)))
        common = io.BytesIO()
        torch.save(self._common(), common)
        write_synced(release / "common.pt", common.getvalue())
        checkpoint_format = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        write_synced(release / "metadata.json", json.dumps(checkpoint_format).encode())
        write_synced(directory / TRACKER, _RELEASE.encode())

    def _metadata(self, notes: Json) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for file in self.files:
            for piece, (start, length) in zip(file.pieces, notes[file.name], strict=True):
                # Keys of the same tensor in other systems refer to the same bytes.
                for key in (piece.location.key, *piece.location.also):
                    offset = torch.Size(piece.offsets)
                    index = MetadataIndex(key, offset, len(chunks[key]))
                    chunks[key].append(ChunkStorageMetadata(offset, torch.Size(piece.sizes)))
                    stored[index] = _StorageInfo(Path(file.name).name, start, length)
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for location in self._tensors:
            for name in (location.key, *location.also):
                properties = TensorProperties(dtype=self._dtypes[location.key])
                tensors[name] = TensorStorageMetadata(properties, torch.Size(location.shape), chunks[name])
        # Path and random id are omitted, so that the same conversion always gives the same bytes.
        return Metadata(tensors, {key: (key,) for key in tensors}, stored, StorageMeta())

    def _common(self) -> Json:
        spec = self.spec
        sizes = self.target.sizes
        return preloaded(
            spec.transformer,
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.gpt["max_sequence_length"],
            tied=spec.gpt.get("share_embeddings_and_output_weights", False),
            iteration=0,
            content_metadata={
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
                "chained_optim_avoid_prefix": True,
                "singleton_local_shards": False,
                # Megatron-LM derives the keys that it expects from this, regardless of its --moe-layer-freq.
                "non_homogeneous_layers": self.numbered,
            },
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            no_save_optim=True,
        )


def _written(location: TensorLocation) -> Iterator[TensorLocation]:
    """Yields the locations of the tensors that are written for `location`: usually one. If its key stores the values
    with 1 subtracted, a second tensor stores the values themselves."""
    if not location.centered:
        yield location
        return
    yield replace(location, also=())
    yield replace(location, key=location.also[0], also=(), centered=False)


def _compare_centered(location: TensorLocation, source: Reading, release: Path) -> None:
    """Raises SlimxError unless the output stores, under the key of `location`, the source's values minus 1."""
    (name,) = location.part.sources
    expected = source.read(name, location.part.rects[0]).float().flatten() - 1
    written = read_whole(release, location.key, read_metadata(release / ".metadata"))
    if not torch.equal(bits(written[location.index]), bits(expected)):
        raise differs(name, f"Megatron's tensor {location.key} does not contain the source's values minus 1")


def _dtypes(
    tensors: Sequence[TensorLocation], source: TensorSource, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Returns the dtype of each key: the one that the weight table declares; if it declares none, `dtype`; if that is
    None, the dtype of the source's tensors. Raises SlimxError if the source stores the tensors of a key in several
    dtypes."""
    out: dict[str, torch.dtype] = {}
    for location in tensors:
        declared = "float32" if location.centered else location.entry.row.dtype
        if declared is not None:
            out[location.key] = getattr(torch, declared)
            continue
        if dtype is not None:
            out[location.key] = dtype
            continue
        for name in location.part.sources:
            actual = source.dtype(name)
            if out.setdefault(location.key, actual) != actual:
                raise SlimxError(
                    f"tensor {name} has dtype {actual}, but another tensor that belongs to Megatron's {location.key} "
                    f"has {out[location.key]}; set one dtype for all tensors with --dtype",
                    code="convert.dtypes",
                    about=name,
                )
    return out


def _split(piece: Piece) -> Iterator[Piece]:
    """Splits a piece by rows into pieces of about BLOCK_BYTES or less."""
    box = piece.box
    step = max(1, BLOCK_BYTES // (box.cols * piece.dtype.itemsize))
    for row in range(0, box.rows, step):
        part = ShardBox(box.shard, box.row + row, box.col, min(step, box.rows - row), box.cols)
        yield Piece(piece.location, part, piece.dtype)


def _fingerprint(identity: str, files: Sequence[TorchDistFile]) -> str:
    digest = hashlib.sha256(identity.encode())
    for file in files:
        for piece in file.pieces:
            digest.update(f"{file.name} {piece.location.key} {piece.offsets} {piece.sizes} {piece.dtype}\n".encode())
    return digest.hexdigest()
