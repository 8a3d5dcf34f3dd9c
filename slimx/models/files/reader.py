"""Reads parts of tensors from a Hugging Face directory of safetensors files without loading whole files, and refuses
weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.maps import Rect
from slimx.layout.number_formats import NumberFormat, StoredTensors, TensorSlice, all_formats
from slimx.layout.table import Stored, Table, stored
from slimx.models.files.index import INDEX, SINGLE, indexed_files, read_object

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
"""Supported dtypes of unquantized tensors, by their names in safetensors files."""
_FLOATS = ("BF16", "F32", "F16", "F64", "F8_E4M3", "F8_E5M2")
"""Names in safetensors files of the dtypes that can store NaN and with which torch can compute."""
_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""fp8 dtype -> smallest code, without the sign bit, that is not a finite number."""
_BLOCK_BYTES = 32 * 2**20
"""Approximate number of bytes of a tensor that are compared or checked at a time."""
BUFFER = ".rotary_emb.inv_freq"
"""Suffix of the names of tensors with rotary frequencies, which transformers saved in checkpoints until 4.31. In
Kimi-K2's files, the shape of these tensors contradicts the model's config.json."""


class CheckpointReader:
    """Reads parts of named tensors from a Hugging Face directory. Each file is opened once and memory-mapped, and only
    requested elements are read."""

    def __init__(self, path: str | Path, *, formats: Mapping[str, NumberFormat] | None = None):
        """Opens the checkpoint in directory `path`. `formats`: number formats in which tensors may be stored, by name;
        None: `all_formats()`. Raises SlimxError if `path` contains no checkpoint."""
        self.path = Path(path)
        self._formats = [*(formats or all_formats()).values()]
        self._files: dict[str, safe_open] = {}
        weight_map = indexed_files(self.path)
        if weight_map is None:
            if not (self.path / SINGLE).is_file():
                raise SlimxError(
                    f"{self.path} contains neither {SINGLE} nor {INDEX}; choose a Hugging Face model directory",
                    code="checkpoint.none",
                    about=str(self.path),
                )
            weight_map = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        self._weight_map = weight_map

    def _open(self, name: str) -> safe_open:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.path / name, framework="pt")
            except SafetensorError as error:
                raise SlimxError(
                    f"{self.path / name}: the file is not a valid safetensors file ({error}); download the file again",
                    code="checkpoint.file",
                    about=name,
                ) from error
        return self._files[name]

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors in the checkpoint."""
        return self._weight_map.keys()

    @cached_property
    def config(self) -> Json:
        """Contents of the checkpoint's config.json."""
        return read_object(self.path / "config.json")

    @property
    def buffers(self) -> list[str]:
        """Names of tensors that every model computes itself (rotary frequencies). They are copied to exports, but
        neither loaded nor checked."""
        return sorted(name for name in self._weight_map if name.endswith(BUFFER))

    def nbytes(self, name: str) -> int:
        """Returns the size in bytes of tensor `name`, estimated at 4 bytes per element."""
        return 4 * math.prod(self.shape(name))

    def whole(self, name: str) -> torch.Tensor:
        """Returns the whole tensor `name` as it is stored, without checking its values."""
        return self.view(name)[:]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape in which tensor `name` is stored."""
        return tuple(self.view(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which `read` returns `name`, a source tensor of a weight table. Quantized tensors are
        returned as bf16."""
        name = stored(name).name
        if self._format(name) is not None:
            return torch.bfloat16
        dtype = self.view(name).get_dtype()
        if dtype not in _DTYPES:
            raise self._unreadable(name, dtype, _DTYPES)
        return _DTYPES[dtype]

    def _format(self, name: str) -> NumberFormat | None:
        """Returns the number format in which tensor `name` of a weight table is stored; None if the tensor is stored
        unquantized."""
        for number_format in self._formats:
            if number_format.holds(self, name):
                return number_format
        return None

    def _wrong(self, name: str, code: str, problem: str) -> SlimxError:
        return SlimxError(f"{self.path}: tensor {name} {problem}", code=f"checkpoint.{code}", about=name)

    def _unreadable(self, name: str, dtype: str, dtypes: Collection[str]) -> SlimxError:
        problem = f"is stored as {dtype} instead of {' or '.join(dtypes)}; restore the file from its source"
        if dtypes is _DTYPES:
            problem = f"is stored as {dtype}, which slimx cannot read; store it as bf16 or fp32"
        return self._wrong(name, "dtype", problem)

    def reopened(self) -> CheckpointReader:
        """Returns a reader of the same directory without open files, for use in another thread or to release mapped
        memory."""
        other = copy(self)
        other._files = {}
        return other

    def check(self, table: Table, *, quantized: bool = False) -> None:
        """Compares the names, shapes and dtypes of all tensors with a weight table. Raises SlimxError, which names the
        first tensor that does not match the table. The values of repeated tensors are compared by `check_copies`.

        `quantized`: True to also accept number formats from which trainers cannot start (`NumberFormat.CONVERTED`)."""
        shapes = table.checkpoint_shapes()
        transposed = table.transposed()
        optional = {name: shapes[original] for name, original in table.aliases.items()} | dict(table.frozen)
        expected: StoredTensors = {}
        for name, shape in {**shapes, **optional}.items():
            if name in shapes or name in self._weight_map:
                expected |= self._expected(name, shape, transposed=name in transposed, quantized=quantized)
        for name, (shape, dtypes) in expected.items():
            if name not in self._weight_map:
                raise self._wrong(
                    name,
                    "missing",
                    "is missing, so the checkpoint does not fit its config.json; restore both from the same source",
                )
            view = self.view(name)
            stored_shape = list(view.get_shape())
            if stored_shape != list(shape):
                problem = (
                    f"has shape {stored_shape}, but its config.json requires {list(shape)}; restore both from the "
                    "same source"
                )
                raise self._wrong(name, "shape", problem)
            if view.get_dtype() not in dtypes:
                raise self._unreadable(name, view.get_dtype(), dtypes)
        unknown = sorted(self._weight_map.keys() - expected.keys() - {*self.buffers})
        if unknown:
            if not quantized:
                for number_format in self._formats:
                    number_format.refuse(self.path, unknown)
            raise self._wrong(
                unknown[0],
                "unknown",
                f"is not in the model that config.json describes ({len(unknown)} such tensors); restore both from the "
                "same source",
            )

    def _expected(self, name: str, shape: tuple[int, ...], *, transposed: bool, quantized: bool) -> StoredTensors:
        """Returns the shape and the possible dtypes of each checkpoint tensor that stores `name`, a weight-table tensor
        of shape `shape`. `transposed`: True for a stack of transposed matrices; `quantized`: True to also accept number
        formats from which trainers cannot start, as in `check`."""
        number_format = self._format(name)
        if number_format is None or (number_format.CONVERTED and not quantized):
            return {name: (shape, _DTYPES)}
        return number_format.tensors(self, name, shape, transposed=transposed)

    def check_copies(self, table: Table) -> None:
        """Compares each tensor that should be a copy of another tensor with its original, bit for bit: a tied output
        layer, or embedding and output layer of a multi-token prediction layer.

        Raises SlimxError, which names the first tensor that differs, because the trainer keeps only the original and
        would lose the other values."""
        for name, original in table.aliases.items():
            if name not in self._weight_map or self._repeats(self.view(name), self.view(original)):
                continue
            raise SlimxError(
                f"{self.path}: tensor {name} differs from {original}, although the two must be equal in this model; "
                f"download the original checkpoint again, or remove {name} from this one",
                code="checkpoint.copy",
                about=name,
            )

    @staticmethod
    def _repeats(copy: TensorSlice, original: TensorSlice) -> bool:
        """Returns True if two stored matrices have the same dtype, shape and bits."""
        rows, cols = copy.get_shape()
        if (copy.get_dtype(), copy.get_shape()) != (original.get_dtype(), original.get_shape()):
            return False
        step = max(1, _BLOCK_BYTES // max(1, 4 * cols))
        blocks = (slice(start, start + step) for start in range(0, rows, step))
        return all(torch.equal(bits(copy[block]), bits(original[block])) for block in blocks)

    def check_finite(self, name: str) -> None:
        """Reads tensor `name` completely, in blocks. Raises SlimxError, which names the tensor, if it contains NaN or
        infinities. Skips buffers, and tensors whose dtype is not in `_FLOATS`."""
        view = self.view(name)
        if view.get_dtype() not in _FLOATS or name.endswith(BUFFER):
            return
        shape = view.get_shape()
        if not shape:
            return check_finite(self._files[self._weight_map[name]].get_tensor(name), name, self.path)
        step = max(1, _BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            check_finite(view[start : start + step], name, self.path)

    def view(self, name: str) -> TensorSlice:
        """Returns a safetensors slice of tensor `name`, from which any part of the tensor can be read as it is
        stored."""
        file = self._weight_map[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise SlimxError(
                f"{self.path / file}: the file lacks tensor {name}, which {INDEX} lists; download both files again",
                code="checkpoint.index",
                about=name,
            ) from error

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Returns the elements [rect.rows, rect.cols] that `rect` selects from `name`, a source tensor of a weight
        table; quantized tensors are dequantized. Raises SlimxError, which names the tensor, if they contain NaN or
        infinities."""
        source = stored(name)
        row_count, col_count = rect.extent
        rows = slice(rect.row, rect.row + row_count)
        cols = slice(rect.col, rect.col + col_count)
        number_format = self._format(source.name)
        if number_format is None:
            part = self._window(source, rows, cols)
        else:
            part = number_format.read(self, source, rows, cols)
        part = part[:: rect.step]
        if not name.endswith(BUFFER):
            check_finite(part, source.name, self.path)
        return part

    def _window(self, source: Stored, rows: slice, cols: slice) -> torch.Tensor:
        view = self.view(source.name)
        shape = view.get_shape()
        if source.index is not None:
            item = slice(source.index, source.index + 1)
            if len(shape) == 2:
                return view[item, rows].T
            return view[item, cols, rows][0].T if source.transposed else view[item, rows, cols][0]
        if len(shape) == 1:
            return view[rows].unsqueeze(1)
        if len(shape) == 3 and shape[1] == 1:
            part = view[rows, :, cols][:, 0]  # a depthwise convolution, read with one row per channel
        elif len(shape) == 3:
            # A stack of matrices counts as one matrix; no rectangle extends from one matrix of the stack into the next.
            index, row = divmod(rows.start, shape[1])
            part = view[index : index + 1, row : row + rows.stop - rows.start, cols][0]
        elif len(shape) > 3:
            # A convolution of a vision tower is small enough to be read completely.
            part = view[:].reshape(-1, shape[-1])[rows, cols]
        else:
            part = view[rows, cols]
        return part


def bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as uint8 [n], in element order, for bitwise comparison."""
    return values.contiguous().flatten().view(torch.uint8)


def check_finite(values: torch.Tensor, name: str, path: Path) -> None:
    """Raises SlimxError if `values`, read from tensor `name` of the checkpoint in `path`, contain NaN or infinities."""
    if not _finite(values):
        raise SlimxError(
            f"{path}: tensor {name} contains NaN or infinite values; restore this file from the checkpoint's source",
            code="checkpoint.finite",
            about=name,
        )


def _finite(values: torch.Tensor) -> bool:
    """Returns True if all values are finite. A sum is checked first, because it is the cheapest reduction (over rows if
    memory is not contiguous) and is finite only if all values are. A sum that is not finite may have overflowed, so
    minimum and maximum then decide.
    """
    least = _CODES.get(values.dtype)
    if least is not None:
        return values.numel() == 0 or bool((values.view(torch.uint8) & 0x7F).max() < least)
    sums = values.sum() if values.is_contiguous() else values.sum(0)
    return bool(sums.isfinite().all()) or bool(torch.stack(values.aminmax()).isfinite().all())
