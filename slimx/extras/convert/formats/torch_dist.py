"""Plans and writes a Megatron directory: torch_dist files of the tensors of a weight table.

    OUT/latest_checkpointed_iteration.txt      "release"
    OUT/release/.metadata  metadata.json  common.pt  __RANK_N.distcp

The format is torch.distributed.checkpoint's: a file is a row of tensors as `torch.save` writes them, and `.metadata`
says where each lies. torch's own `FileSystemWriter.write_data` keeps every tensor of a file until the file is closed
(torch 2.13), and megatron-core's save wants the whole model first; here one piece at a time is made and written.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
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
from slimx.extras.convert.target import Box, Target
from slimx.extras.convert.work import Stream
from slimx.extras.megatron_files.directory import TensorPlace, places
from slimx.layout.maps import Rect
from slimx.layout.parts import matrix
from slimx.models.families import ModelSpec
from slimx.models.files.reader import bits
from slimx.models.files.safe_pickle import read_metadata
from slimx.models.files.torch_dist import TRACKER, preloaded

FILE_BYTES = 5 * 10**8
"""A rank that reads a file of a thousand others should not wait long for it; a model of 1 TB has 2,000 of them."""
_RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one tensor, stored on its own."""

    place: TensorPlace
    box: Box
    dtype: torch.dtype

    @property
    def offsets(self) -> Shape:
        """Position of its first element in the whole tensor."""
        return (*self.place.index, *self._trim(self.box.row, self.box.col, (0,) * len(self._inner)))

    @property
    def sizes(self) -> Shape:
        return (*(1 for _ in self.place.index), *self._trim(self.box.rows, self.box.cols, self._inner))

    @property
    def _inner(self) -> Shape:
        """Axes between rows and columns: of length 1 in every model (a depthwise convolution's)."""
        return self.place.part.shape[1:-1]

    @property
    def nbytes(self) -> int:
        return self.box.rows * self.box.cols * self.dtype.itemsize

    def _trim(self, row: int, col: int, inner: Shape) -> Shape:
        return (row,) if len(self.place.part.shape) == 1 else (row, *inner, col)

    def make(self, reading: Reading) -> torch.Tensor:
        """Make the piece's values, in the scratch memory of `reading`."""
        box, part = self.box, self.place.part
        out = reading.scratch.tensor((box.rows, box.cols), self.dtype)
        for rect in part.rects:
            if (inside := clip(rect, box)) is not None:
                target = out[inside.local_row :, inside.local_col :][: inside.rows, : inside.cols]
                target.copy_(reading.read(part.sources[rect.source], inside))
        return (out.sub_(1) if self.place.centred else out).view(self.sizes)


def _inside(place: TensorPlace, boxes: Sequence[Box]) -> Iterator[Box]:
    """The parts of `boxes`, which cut the whole tensor of an entry, that lie in the section at `place`."""
    rows, _ = matrix(place.part.shape)
    for box in boxes:
        top, end = max(box.row, place.first), min(box.row + box.rows, place.first + rows)
        if top < end:
            yield box._replace(row=top - place.first, rows=end - top)


def clip(rect: Rect, box: Box) -> Rect | None:
    """The part of `rect` inside `box`, which its local place counts from; None if they do not meet."""
    top, left = max(rect.local_row, box.row), max(rect.local_col, box.col)
    rows = min(rect.local_row + rect.rows, box.row + box.rows) - top
    cols = min(rect.local_col + rect.cols, box.col + box.cols) - left
    if rows <= 0 or cols <= 0:
        return None
    down, right = top - rect.local_row, left - rect.local_col
    row, col = rect.row + down * rect.step, rect.col + right
    return Rect(rect.source, row, col, rows, cols, top - box.row, left - box.col, rect.step)


@dataclass(slots=True)
class TorchDistFile:
    """One file of pieces."""

    name: str
    source: TensorSource
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0

    def write(self, stream: Stream) -> list[list[int]]:
        """Returns position and length of each piece, in bytes."""
        reading, places_ = Reading(self.source), []
        for piece in self.pieces:
            start = stream.tell()
            torch.save(piece.make(reading), stream)
            places_.append([start, stream.tell() - start])
        return places_


class ToMegatron:
    """Hugging Face tensors into a release of Megatron-LM."""

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
        """`dtype`: of the model; None: each tensor as it is stored. `numbered`: every layer has keys of its own, else
        one key stacks the layers. `origin`: identifies the source's content."""
        self._file_bytes, self._source = file_bytes, source
        self.spec, self.target, self.numbered = spec, target, numbered
        everything = [kept for place in places(spec.table, per_layer=numbered) for kept in _kept(place)]
        self._dtypes = _dtypes(everything, source, dtype)
        self._everything, self._places = everything, {place.key: place for place in everything}
        self.files = self._plan(everything, source)
        self.fingerprint = _fingerprint(f"hf-to-megatron {origin} {target}", self.files)

    def _plan(self, everything: Sequence[TensorPlace], source: TensorSource) -> list[TorchDistFile]:
        """Files of each rank, filled one after the other in the order of the checkpoint."""
        files: list[TorchDistFile] = []
        open_: dict[int, TorchDistFile] = {}
        count: dict[int, int] = {}
        for place in everything:
            for box in _inside(place, self.target.boxes(place.entry)):
                rank = self.target.rank(place.entry, box.shard)
                for piece in _split(Piece(place, box, self._dtypes[place.key])):
                    file = open_.get(rank)
                    if file is None or file.nbytes + piece.nbytes > self._file_bytes:
                        number = count[rank] = count.get(rank, -1) + 1
                        file = open_[rank] = TorchDistFile(f"{_RELEASE}/__{rank}_{number}.distcp", source)
                        files.append(file)
                    file.pieces.append(piece)
                    file.nbytes += piece.nbytes
        return files

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Leave out the checksums of `torch.save`, which take half its time: `torch.load` does not look at them, and a
        conversion has its own."""
        before = get_crc32_options()
        set_crc32_options(False)
        try:
            yield
        finally:
            set_crc32_options(before)

    @property
    def small(self) -> Sequence[str]:
        """Files that `finish` adds."""
        return (*(f"{_RELEASE}/{name}" for name in (".metadata", "common.pt", "metadata.json")), TRACKER)

    def compare(self, directory: Path, advance: Advance) -> None:
        """Read every tensor of the output by the way back, and compare it with the source's. Raises SlimxError naming
        the first that differs."""
        written = Reading(TorchDistReader(directory, self.spec.table))
        source = Reading(self._source)
        for place in self._everything:
            if place.first:
                continue  # the sources are those of the first section
            if place.centred:
                _compare_centred(place, source, directory / _RELEASE)
                continue
            for name, (_, shape) in zip(place.entry.sources, place.entry.row.sources, strict=True):
                compare_copied(name, shape, self._dtypes[place.key], source, written, advance)

    def finish(self, directory: Path, notes: Mapping[str, list[list[int]]]) -> None:
        """Metadata, arguments, format and tracker: `small`."""
        release = directory / _RELEASE
        write_synced(release / ".metadata", pickle.dumps(self._metadata(notes)))
        common = io.BytesIO()
        torch.save(self._common(), common)
        write_synced(release / "common.pt", common.getvalue())
        form = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        write_synced(release / "metadata.json", json.dumps(form).encode())
        write_synced(directory / TRACKER, _RELEASE.encode())

    def _metadata(self, notes: Mapping[str, list[list[int]]]) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for file in self.files:
            for piece, (start, length) in zip(file.pieces, notes[file.name], strict=True):
                # What other systems call otherwise stands under their key too: the same bytes.
                for key in (piece.place.key, *piece.place.also):
                    offset, known = torch.Size(piece.offsets), chunks[key]
                    index = MetadataIndex(key, offset, len(known))
                    known.append(ChunkStorageMetadata(offset, torch.Size(piece.sizes)))
                    stored[index] = _StorageInfo(Path(file.name).name, start, length)
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=self._dtypes[key]), torch.Size(place.shape), chunks[name]
            )
            for key, place in self._places.items()
            for name in (key, *place.also)
        }
        # No path and no random id: the same conversion gives the same bytes.
        return Metadata(tensors, {key: (key,) for key in tensors}, stored, StorageMeta())

    def _common(self) -> dict[str, Any]:
        spec, sizes = self.spec, self.target.sizes
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
                # Megatron-LM builds the keys that it looks for by this, whatever its --moe-layer-freq.
                "non_homogeneous_layers": self.numbered,
            },
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            no_save_optim=True,
        )


def _kept(place: TensorPlace) -> Iterator[TensorPlace]:
    """The tensors that the one at `place` is written as: two if its key holds it less 1."""
    if not place.centred:
        yield place
        return
    yield replace(place, also=())
    yield replace(place, key=place.also[0], also=(), centred=False)


def _compare_centred(place: TensorPlace, source: Reading, release: Path) -> None:
    """Raises SlimxError unless the key of `place` holds the source's values less 1."""
    (name,) = place.part.sources
    wanted = source.read(name, place.part.rects[0]).float().flatten() - 1
    written = read_whole(release, place.key, read_metadata(release / ".metadata"))
    if not torch.equal(bits(written[place.index]), bits(wanted)):
        raise differs(name, f"{place.key} does not hold its values less 1")


def _dtypes(
    everything: Sequence[TensorPlace], source: TensorSource, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Dtype of each key: its row's own, else `dtype`, else the one in which the source stores the key's tensors. Raises
    SlimxError where it stores them in several."""
    out: dict[str, torch.dtype] = {}
    for place in everything:
        own = "float32" if place.centred else place.entry.row.dtype
        if own is not None or dtype is not None:
            out[place.key] = getattr(torch, own) if own is not None else dtype
            continue
        for name in place.part.sources:
            found = source.dtype(name)
            if out.setdefault(place.key, found) != found:
                raise SlimxError(
                    f"tensor {name} is stored as {found} and others of {place.key}, one tensor in Megatron, as "
                    f"{out[place.key]}: the bits of both cannot be kept; choose --dtype",
                    code="convert.dtypes",
                    about=name,
                )
    return out


def _split(piece: Piece) -> Iterator[Piece]:
    """Pieces of a bounded size, by rows."""
    box = piece.box
    step = max(1, BLOCK_BYTES // (box.cols * piece.dtype.itemsize))
    for row in range(0, box.rows, step):
        part = Box(box.shard, box.row + row, box.col, min(step, box.rows - row), box.cols)
        yield Piece(piece.place, part, piece.dtype)


def _fingerprint(what: str, files: Sequence[TorchDistFile]) -> str:
    digest = hashlib.sha256(what.encode())
    for file in files:
        for piece in file.pieces:
            digest.update(f"{file.name} {piece.place.key} {piece.offsets} {piece.sizes} {piece.dtype}\n".encode())
    return digest.hexdigest()
