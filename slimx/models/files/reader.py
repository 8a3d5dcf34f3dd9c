"""Reads slices of tensors out of a Hugging Face directory of safetensors files, without loading whole files, and
refuses weights that are no finite numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.number_formats import NumberFormat, StoredTensors, all_formats
from slimx.layout.table import Stored, Table, stored
from slimx.models.files.index import INDEX, SINGLE, indexed_files, read_object

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
"""Dtypes as they are read, by the names of safetensors files."""
_FLOATS = ("BF16", "F32", "F16", "F64", "F8_E4M3", "F8_E5M2")
"""Dtypes in which NaN can be stored, of those that `torch` computes with."""
_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The smallest code, without its sign, of an fp8 dtype that is no finite number."""
_BLOCK_BYTES = 32 * 2**20
"""Bytes of a tensor that are compared with another's at a time."""
BUFFER = ".rotary_emb.inv_freq"
"""End of the name of rotary frequencies, which transformers saved until 4.31. In Kimi-K2's files their shape is another
than its config.json says."""


class CheckpointReader:
    """Slices of named tensors; files are opened once, memory-mapped, and only what is asked for is read."""

    def __init__(self, path: str | Path, *, formats: Mapping[str, NumberFormat] | None = None):
        """`formats`: in the place of `all_formats`."""
        self.path = Path(path)
        self._formats = [*(formats or all_formats()).values()]
        self._files: dict[str, Any] = {}
        where = indexed_files(self.path)
        if where is None:
            if not (self.path / SINGLE).is_file():
                raise SlimxError(
                    f"{self.path}: no {SINGLE} and no {INDEX}; give a Hugging Face model directory",
                    code="checkpoint.none",
                    about=str(self.path),
                )
            where = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        self._where = where

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.path / name, framework="pt")
            except SafetensorError as error:
                raise SlimxError(
                    f"{self.path / name}: truncated or not a safetensors file ({error}); download it again",
                    code="checkpoint.file",
                    about=name,
                ) from error
        return self._files[name]

    @property
    def names(self) -> KeysView[str]:
        """Every tensor of the checkpoint."""
        return self._where.keys()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        return read_object(self.path / "config.json")

    @property
    def buffers(self) -> list[str]:
        """Names of the tensors that every model computes itself: carried over, and neither read nor compared."""
        return sorted(name for name in self._where if name.endswith(BUFFER))

    def nbytes(self, name: str) -> int:
        """Size of a tensor, estimated at 4 bytes per element."""
        return 4 * math.prod(self.shape(name))

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor as it is stored, whatever its values."""
        return self.view(name)[:]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return tuple(self.view(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which `read` returns source `name`: codes are read as bf16."""
        name = stored(name).name
        if self._format(name) is not None:
            return torch.bfloat16
        found = self.view(name).get_dtype()
        if found not in _DTYPES:
            raise self._unread(name, found)
        return _DTYPES[found]

    def _format(self, name: str) -> NumberFormat | None:
        """The format in which tensor `name` of a table is stored; None for plain values."""
        return next((each for each in self._formats if each.holds(self, name)), None)

    def _wrong(self, name: str, code: str, what: str) -> SlimxError:
        return SlimxError(f"{self.path}: tensor {name} {what}", code=f"checkpoint.{code}", about=name)

    def _unread(self, name: str, found: str, dtypes: Collection[str] = _DTYPES) -> SlimxError:
        what = f"is stored as {found}, not {' or '.join(dtypes)}; restore the file from its source"
        if dtypes is _DTYPES:
            what = f"is stored as {found}, which slimx does not read; store it as bf16 or fp32"
        return self._wrong(name, "dtype", what)

    def reopened(self) -> CheckpointReader:
        """The same directory with no file open: for another thread, or to let go of the memory that is mapped."""
        other = copy(self)
        other._files = {}
        return other

    def check(self, table: Table, *, quantised: bool = False) -> None:
        """Compare names, shapes and dtypes with a weight table; raises SlimxError naming the first tensor that does not
        fit. What repeats another tensor is compared with it by `check_copies`.

        `quantised`: tensors may be in formats that trainers do not start from (`NumberFormat.CONVERTED`).
        """
        shapes, turned = table.checkpoint_shapes(), table.turned()
        optional = {name: shapes[original] for name, original in table.aliases.items()} | dict(table.frozen)
        expected: StoredTensors = {}
        for name, shape in {**shapes, **optional}.items():
            if name in shapes or name in self._where:
                expected |= self._expected(name, shape, turned=name in turned, quantised=quantised)
        for name, (shape, dtypes) in expected.items():
            if name not in self._where:
                raise self._wrong(name, "missing", "is missing; the checkpoint does not fit its config.json")
            view = self.view(name)
            found = tuple(view.get_shape())
            if found != tuple(shape):
                raise self._wrong(name, "shape", f"has shape {list(found)}, its config.json wants {list(shape)}")
            if view.get_dtype() not in dtypes:
                raise self._unread(name, view.get_dtype(), dtypes)
        unknown = sorted(self._where.keys() - expected.keys() - {*self.buffers})
        if unknown:
            for each in () if quantised else self._formats:
                each.refuse(self.path, unknown)
            raise self._wrong(unknown[0], "unknown", f"has no place in the model ({len(unknown)} such tensors)")

    def _expected(self, name: str, shape: tuple[int, ...], *, turned: bool, quantised: bool) -> StoredTensors:
        """Tensors of the checkpoint that store tensor `name` of a table."""
        kept = self._format(name)
        if kept is None or (kept.CONVERTED and not quantised):
            return {name: (shape, _DTYPES)}
        return kept.tensors(self, name, shape, turned=turned)

    def check_copies(self, table: Table) -> None:
        """Compare every tensor of the checkpoint that is said to repeat another (a tied output layer, those of layers
        of multi-token prediction) with it, bit for bit. Reads both.

        Raises SlimxError naming one that differs: the trainer holds the original alone, and would lose it."""
        for name, original in table.aliases.items():
            if name not in self._where or self._repeats(self.view(name), self.view(original)):
                continue
            raise SlimxError(
                f"{self.path}: tensor {name} is not the {original} that it repeats in this model, and only one of them "
                "can be kept; remove it from the checkpoint, or correct tie_word_embeddings if it is one of its own",
                code="checkpoint.copy",
                about=name,
            )

    @staticmethod
    def _repeats(copy: Any, original: Any) -> bool:
        """Returns True if two stored matrices have the same dtype and bits."""
        rows, cols = copy.get_shape()
        if (copy.get_dtype(), copy.get_shape()) != (original.get_dtype(), original.get_shape()):
            return False
        step = max(1, _BLOCK_BYTES // max(1, 4 * cols))
        blocks = (slice(at, at + step) for at in range(0, rows, step))
        return all(torch.equal(bits(copy[block]), bits(original[block])) for block in blocks)

    def check_finite(self, name: str) -> None:
        """Read a whole tensor, piece by piece. Raises SlimxError, naming it, for NaN and infinities in numbers of the
        kinds of `_FLOATS`."""
        view = self.view(name)
        if view.get_dtype() not in _FLOATS or name.endswith(BUFFER):
            return
        if not (shape := view.get_shape()):
            return check_finite(self._files[self._where[name]].get_tensor(name), name, self.path)
        step = max(1, _BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
        for at in range(0, shape[0], step):
            check_finite(view[at : at + step], name, self.path)

    def view(self, name: str) -> Any:
        """Tensor `name` as its file has it: a slice of safetensors, of which parts are read."""
        file = self._where[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise SlimxError(
                f"{self.path / file}: does not hold tensor {name}, which {INDEX} puts there; download both again",
                code="checkpoint.index",
                about=name,
            ) from error

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """The elements of source `name` of a table that `rect` takes, [rect.rows, rect.cols] as the local tensor holds
        them. Raises SlimxError, naming the tensor, for NaN and infinities among them."""
        place, (rows, cols) = stored(name), rect.extent
        window = slice(rect.row, rect.row + rows), slice(rect.col, rect.col + cols)
        kept = self._format(place.name)
        part = self._window(place, *window) if kept is None else kept.read(self, place, *window)
        part = part[:: rect.step]
        if not name.endswith(BUFFER):
            check_finite(part, place.name, self.path)
        return part

    def _window(self, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        view = self.view(place.name)
        shape = view.get_shape()
        if place.index is not None:
            one = slice(place.index, place.index + 1)
            if len(shape) == 2:
                return view[one, rows].T
            return view[one, cols, rows][0].T if place.turned else view[one, rows, cols][0]
        if len(shape) == 1:
            return view[rows].unsqueeze(1)
        if len(shape) == 3 and shape[1] == 1:
            part = view[rows, :, cols][:, 0]  # a depthwise convolution's: one row of each
        elif len(shape) == 3:
            # A stack of matrices, read as one matrix; no rectangle reaches over the edge of one.
            index, row = divmod(rows.start, shape[1])
            part = view[index : index + 1, row : row + rows.stop - rows.start, cols][0]
        elif len(shape) > 3:
            # A convolution of a vision tower: small enough to read whole.
            part = view[:].reshape(-1, shape[-1])[rows, cols]
        else:
            part = view[rows, cols]
        return part


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bytes [n] of a tensor in the order of its elements: equal numbers may differ in them, NaN equals nothing."""
    return values.contiguous().flatten().view(torch.uint8)


def check_finite(values: torch.Tensor, name: str, path: Path) -> None:
    """Raises SlimxError if `values`, read of tensor `name` of the checkpoint `path`, hold NaN or an infinity:
    training, conversions and exports would go on."""
    if not _finite(values):
        raise SlimxError(
            f"{path}: tensor {name} holds NaN or infinite values; restore the file from its source",
            code="checkpoint.finite",
            about=name,
        )


def _finite(values: torch.Tensor) -> bool:
    """Sums are not finite where a value is not, and of all reductions the cheapest: those of columns where values do
    not lie together. A sum of finite values may overflow; the smallest and the largest value decide then."""
    if (least := _CODES.get(values.dtype)) is not None:
        return values.numel() == 0 or bool((values.view(torch.uint8) & 0x7F).max() < least)
    sums = values.sum() if values.is_contiguous() else values.sum(0)
    return bool(sums.isfinite().all()) or bool(torch.stack(values.aminmax()).isfinite().all())
