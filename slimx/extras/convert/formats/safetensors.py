"""Plans and writes a Hugging Face directory: safetensors files, index, config and tokenizer.

Files are written sequentially, in blocks of rows, because safetensors' `save_file` needs all tensors of a file in
memory. A file consists of a length of 8 bytes, a JSON header with each tensor's dtype, shape and offsets, and the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from slimx.durable import write_synced
from slimx.errors import SlimxError
from slimx.extras.convert.compare import compare_copied
from slimx.extras.convert.sources import Advance, Reading, Shape, TensorSource, row_blocks
from slimx.extras.convert.work import Stream
from slimx.json_types import Json
from slimx.layout.maps import Rect
from slimx.layout.table import stored
from slimx.models.files.index import INDEX
from slimx.models.files.reader import CheckpointReader
from slimx.models.files.writer import TENSOR_SUFFIXES, shard_name

CONFIG = "config.json"
FILE_BYTES = 2 * 10**9
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
_NAMES |= {torch.int32: "I32", torch.int64: "I64"}
"""Names of dtypes in the headers of safetensors files."""


class Tensor(NamedTuple):
    """Name, dtype and shape of an output tensor."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are converted together. `blocks` yields their bytes, one tensor after another, in blocks."""

    tensors: tuple[Tensor, ...]
    blocks: Callable[[Reading], Iterator[torch.Tensor]]
    compare: Callable[[Reading, Reading, Advance], None]
    """Function (source, output, progress callback) that compares the tensors' values in source and output. Raises
    SlimxError naming a tensor that differs."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(name: str, shape: Shape, dtype: torch.dtype) -> Unit:
    """Plans a copy of the source's tensor `name`, converted to `dtype`."""

    def blocks(reading: Reading) -> Iterator[torch.Tensor]:
        for rect in row_blocks(shape, dtype.itemsize):
            part = reading.read(name, rect)
            yield part if part.dtype == dtype else reading.scratch.tensor(tuple(part.shape), dtype).copy_(part)

    def compare(source: Reading, written: Reading, advance: Advance) -> None:
        compare_copied(name, shape, dtype, source, written, advance)

    return Unit((Tensor(name, dtype, shape),), blocks, compare)


def stacked(name: str, sources: Sequence[str], shape: Shape, dtype: torch.dtype) -> Unit:
    """Plans the tensor `name` of `shape` [count, ...] and `dtype` as a stack of the tensors `sources`, named as in the
    weight table (`slimx.layout.table`)."""

    def blocks(reading: Reading) -> Iterator[torch.Tensor]:
        for source in sources:
            for rect in row_blocks(shape[1:], dtype.itemsize):
                if stored(source).transposed:
                    rect = Rect(0, rect.col, rect.row, rect.cols, rect.rows, 0, 0)
                    part = reading.read(source, rect).T
                else:
                    part = reading.read(source, rect)
                yield reading.scratch.tensor(tuple(part.shape), dtype).copy_(part)

    def compare(source: Reading, written: Reading, advance: Advance) -> None:
        for member in sources:
            single = shape[:0:-1] if stored(member).transposed else shape[1:]
            compare_copied(member, single, dtype, source, written, advance)

    return Unit((Tensor(name, dtype, shape),), blocks, compare)


@dataclass(slots=True)
class SafetensorsFile:
    """Safetensors file that the conversion will write."""

    source: TensorSource
    name: str = ""
    units: list[Unit] = field(default_factory=list)
    nbytes: int = 0

    def write(self, stream: Stream) -> None:
        """Writes the header, then the blocks of every unit."""
        reading = Reading(self.source)
        # Tensors are stored without gaps. Units with odd sizes come last, so that the other tensors are aligned.
        units = sorted(self.units, key=lambda unit: any(tensor.nbytes % 8 for tensor in unit.tensors))
        stream.write(_header(list(chain(*(unit.tensors for unit in units)))))
        for unit in units:
            for block in unit.blocks(reading):
                stream.write(block.contiguous().reshape(-1).view(torch.uint8).numpy())
                del block


def _header(tensors: Sequence[Tensor]) -> bytes:
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ToHuggingFace:
    """Planned conversion to a Hugging Face directory that contains the tensors of `units`."""

    def __init__(
        self,
        units: Sequence[Unit],
        source: TensorSource,
        *,
        file_bytes: int,
        identity: str,
        template: Path,
        config: Json,
    ):
        """Plans the files. `file_bytes`: approximate size of a file. `identity`: string that identifies the conversion,
        its options and its source's content. `template`: directory whose files without tensors are copied. `config`:
        contents of the new config.json."""
        self.template = template
        self.config = config
        self.files: list[SafetensorsFile] = []
        for unit in units:
            if not self.files or self.files[-1].nbytes + unit.nbytes > file_bytes:
                self.files.append(SafetensorsFile(source))
            self.files[-1].units.append(unit)
            self.files[-1].nbytes += unit.nbytes
        self._source = source
        digest = hashlib.sha256(identity.encode())
        for index, file in enumerate(self.files):
            file.name = shard_name(index, len(self.files))
            digest.update(repr([file.name, [unit.tensors for unit in file.units]]).encode())
        self.fingerprint = digest.hexdigest()

    def writing(self) -> AbstractContextManager[None]:
        """Returns a context manager that does nothing, because writing safetensors files needs no preparation."""
        return nullcontext()

    @property
    def small(self) -> Sequence[str]:
        """Names of the files that `finish` writes."""
        return (INDEX, CONFIG, *(file.name for file in self._carried()))

    def _carried(self) -> list[Path]:
        """Returns the files of the template that contain no tensors, except config.json. Raises SlimxError for a link
        whose target does not exist."""
        files = [file for file in sorted(self.template.iterdir()) if not file.name.endswith(TENSOR_SUFFIXES)]
        for file in files:
            if not file.exists():
                raise SlimxError(
                    f"{file} is a link to {file.readlink()}, which does not exist; download the linked file again, or "
                    "remove the link",
                    code="convert.link",
                    about=str(file),
                )
        return [file for file in files if file.is_file() and file.name != CONFIG]

    def compare(self, directory: Path, advance: Advance) -> None:
        """Reads the output through its headers and index, and compares every tensor with the source's. Raises
        SlimxError naming a tensor that differs."""
        source = Reading(self._source)
        written = Reading(CheckpointReader(directory))
        for file in self.files:
            for unit in file.units:
                unit.compare(source, written, advance)

    def finish(self, directory: Path, notes: Json) -> None:
        """Writes the index and the config to `directory`, and copies the template's other files. `notes`: not used."""
        weight_map = {}
        for file in self.files:
            for unit in file.units:
                for tensor in unit.tensors:
                    weight_map[tensor.name] = file.name
        total = sum(file.nbytes for file in self.files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=1, sort_keys=True)
        write_synced(directory / INDEX, text.encode())
        for path in self._carried():
            shutil.copy2(path, directory / path.name)
        write_synced(directory / CONFIG, (json.dumps(self.config, indent=2) + "\n").encode())
