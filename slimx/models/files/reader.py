"""Reads slices of tensors out of a Hugging Face directory of safetensors files, without loading whole files."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.table import Stored, Table, stored
from slimx.models.files import int4, mxfp4
from slimx.models.files.block_fp8 import SCALE_SUFFIX, Block, Dequantise, block_of, dequantise, scales_shape
from slimx.models.files.finite import check_finite
from slimx.models.files.index import INDEX, SINGLE, indexed_files

_FP8 = "F8_E4M3"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, _FP8: torch.bfloat16}
"""Dtypes as they are read, by the names of safetensors files."""
_FLOATS = ("BF16", "F32", "F16", "F64", "F8_E4M3", "F8_E5M2")
"""Dtypes in which NaN can be stored, of those that `torch` computes with."""
_SCALES = ("F32", "BF16", "F16")
"""Dtypes that scales of fp8 blocks may have: those that become fp32 without a loss."""
_BLOCK_BYTES = 32 * 2**20
"""Bytes of a tensor that are compared with another's at a time."""
BUFFER = ".rotary_emb.inv_freq"
"""End of the name of rotary frequencies, which transformers saved until 4.31. In Kimi-K2's files their shape is another
than its config.json says."""


class CheckpointReader:
    """Slices of named tensors; files are opened once, memory-mapped, and only what is asked for is read."""

    def __init__(self, path: str | Path, *, dequantise: Dequantise = dequantise):
        """`dequantise`: how blocks of fp8 become bf16."""
        self.path = Path(path)
        self._dequantise = dequantise
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
    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        return frozenset(self._where)

    @property
    def buffers(self) -> list[str]:
        """Names of the tensors that every model computes itself: carried over, and neither read nor compared."""
        return sorted(name for name in self._where if name.endswith(BUFFER))

    def nbytes(self, name: str) -> int:
        """Size of a tensor, estimated at 4 bytes per element."""
        return 4 * math.prod(self.shape(name))

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor as it is stored, whatever its values."""
        return self._view(name)[:]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return tuple(self._view(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which `read` returns source `name`: blocks of fp8, MXFP4 and INT4 are read as bf16."""
        name = stored(name).name
        if self._packed(name) or self._in_int4(name):
            return torch.bfloat16
        found = self._view(name).get_dtype()
        if found not in _DTYPES:
            raise self._unread(name, found)
        return _DTYPES[found]

    def _wrong(self, name: str, code: str, what: str) -> SlimxError:
        return SlimxError(f"{self.path}: tensor {name} {what}", code=f"checkpoint.{code}", about=name)

    def _unread(self, name: str, found: str) -> SlimxError:
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

        `quantised`: tensors may be in fp8 with block scales beside them.
        """
        expected = self._as_packed(table.checkpoint_shapes(), table.turned())
        optional = {name: expected[original] for name, original in table.aliases.items()} | dict(table.frozen)
        for name, shape in {**expected, **optional}.items():
            if name not in self._where:
                if name in optional:
                    continue
                raise self._wrong(name, "missing", "is missing; the checkpoint does not fit its config.json")
            view = self._view(name)
            found = tuple(view.get_shape())
            if found != tuple(shape):
                raise self._wrong(name, "shape", f"has shape {list(found)}, its config.json wants {list(shape)}")
            self._check_dtype(name, view.get_dtype(), found, quantised)
        scales = [name for name in self._where if name.endswith(SCALE_SUFFIX) and name not in optional]
        if scales and not quantised:
            raise SlimxError(
                f"{self.path}: {scales[0]} holds scales of fp8 blocks ({len(scales)} such tensors); slimx trains from "
                "bf16 and fp32 checkpoints: `slimx convert hf-to-megatron` makes one of it",
                code="checkpoint.fp8",
                about=scales[0],
            )
        known = {**expected, **optional}
        known |= dict.fromkeys(self.buffers, ())
        unknown = sorted(n for n in self._where if n not in known and n.removesuffix(SCALE_SUFFIX) not in known)
        if unknown:
            raise self._wrong(unknown[0], "unknown", f"has no place in the model ({len(unknown)} such tensors)")

    def check_copies(self, table: Table) -> None:
        """Compare every tensor of the checkpoint that is said to repeat another (a tied output layer, those of layers
        of multi-token prediction) with it, bit for bit. Reads both.

        Raises SlimxError naming one that differs: the trainer holds the original alone, and would lose it."""
        for name, original in table.aliases.items():
            if name not in self._where or self._repeats(self._view(name), self._view(original)):
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
        view = self._view(name)
        if view.get_dtype() not in _FLOATS or name.endswith(BUFFER):
            return
        if not (shape := view.get_shape()):
            return check_finite(self._files[self._where[name]].get_tensor(name), name, self.path)
        step = max(1, _BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
        for at in range(0, shape[0], step):
            check_finite(view[at : at + step], name, self.path)

    def _check_dtype(self, name: str, found: str, shape: tuple[int, ...], quantised: bool) -> None:
        """Refuse a tensor of another dtype than `_DTYPES`: its bits would be read as numbers that they are not."""
        if found == _FP8 and quantised and len(shape) == 2:
            self._check_scales(name, shape)
        elif suffix := self._where_int4.get(name):
            if found not in int4.DTYPES[suffix]:
                wanted = " or ".join(int4.DTYPES[suffix])
                what = f"is stored as {found}, not {wanted}; restore the file from its source"
                raise self._wrong(name, "dtype", what)
        elif name not in self._where_packed and (found == _FP8 or found not in _DTYPES):
            raise self._unread(name, found)
        elif name in self._where_packed and found != "U8":
            raise self._wrong(name, "dtype", f"is stored as {found}, MXFP4 is U8; restore the file from its source")

    @cached_property
    def _where_packed(self) -> frozenset[str]:
        """Names of the tensors in MXFP4: codes and scales."""
        stems = {n.removesuffix(mxfp4.BLOCKS) for n in self._where if n.endswith(mxfp4.BLOCKS)} - self._where.keys()
        return frozenset(stem + suffix for stem in stems for suffix in (mxfp4.BLOCKS, mxfp4.SCALES))

    def _in_int4(self, name: str) -> bool:
        return name not in self._where and name + int4.CODES in self._where

    @cached_property
    def _where_int4(self) -> dict[str, str]:
        """Names of the tensors that hold matrices in INT4, with what they are of them: a suffix of `int4`."""
        stems = {n.removesuffix(int4.CODES) for n in self._where if n.endswith(int4.CODES)} - self._where.keys()
        return {stem + suffix: suffix for stem in stems for suffix in int4.DTYPES}

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        scales = name + SCALE_SUFFIX
        if scales not in self._where:
            raise SlimxError(
                f"{self.path}: tensor {name} is in fp8, but its scales {scales} are missing",
                code="checkpoint.missing",
                about=scales,
            )
        wanted, found = scales_shape(shape, self._block), self.shape(scales)
        if found != wanted:
            blocks = f"blocks of {self._block[0]} x {self._block[1]}"
            raise self._wrong(scales, "shape", f"has shape {list(found)}, {blocks} want {list(wanted)}")
        if (kind := self._view(scales).get_dtype()) not in _SCALES:
            raise self._unread(scales, kind)

    @cached_property
    def _block(self) -> Block:
        return block_of(self.path)

    def _view(self, name: str) -> Any:
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
        if self._packed(place.name):
            part = self._packed_window(place, *window)
        elif self._in_int4(place.name):
            part = self._int4_window(place.name, *window)
        else:
            part = self._window(place, *window)
        part = part[:: rect.step]
        if not name.endswith(BUFFER):
            check_finite(part, place.name, self.path)
        return part

    def _window(self, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        view = self._view(place.name)
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
        if view.get_dtype() == _FP8:
            part = self._dequantise(
                part, self.whole(place.name + SCALE_SUFFIX).float(), self._block, rows.start, cols.start
            )
        return part

    def _packed(self, name: str) -> bool:
        return name not in self._where and name + mxfp4.BLOCKS in self._where

    def _as_packed(self, shapes: Mapping[str, tuple[int, ...]], turned: Collection[str]) -> dict[str, tuple[int, ...]]:
        """`shapes` with the tensors that this checkpoint keeps in MXFP4 or INT4 under the names and shapes that they
        have there."""
        out: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            if name in turned and self._packed(name):
                count, rows, cols = shape
                out |= {name + suffix: packed for suffix, packed in mxfp4.packed_shapes((count, cols, rows)).items()}
            elif len(shape) == 2 and self._in_int4(name):
                out |= {name + suffix: packed for suffix, packed in int4.packed_shapes(shape).items()}
            else:
                out[name] = shape
        return out

    def _int4_window(self, name: str, rows: slice, cols: slice) -> torch.Tensor:
        first, stop = cols.start // int4.GROUP, -(-cols.stop // int4.GROUP)
        words = int4.GROUP // int4.PER_WORD
        codes = self._view(name + int4.CODES)[rows, first * words : stop * words]
        values = int4.dequantise(codes, self._view(name + int4.SCALES)[rows, first:stop])
        start = first * int4.GROUP
        return values[:, cols.start - start : cols.stop - start]

    def _packed_window(self, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        """Window of an MXFP4 stack, whose codes stand as the table names its matrices: transposed to a stack's own."""
        first, stop = cols.start // mxfp4.GROUP, -(-cols.stop // mxfp4.GROUP)
        window = slice(place.index, place.index + 1), rows, slice(first, stop)
        blocks, scales = (self._view(place.name + suffix)[window] for suffix in (mxfp4.BLOCKS, mxfp4.SCALES))
        start = first * mxfp4.GROUP
        return mxfp4.dequantise(blocks, scales)[0, :, cols.start - start : cols.stop - start]


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bytes [n] of a tensor in the order of its elements: equal numbers may differ in them, NaN equals nothing."""
    return values.contiguous().flatten().view(torch.uint8)
