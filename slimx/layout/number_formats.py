"""Number formats of weights: plain dtypes, and formats that store a matrix as codes and scales (fp8, INT4, ...).

A format is an instance of a subclass of `NumberFormat`, registered as an entry point of the group
`slimx.number_formats` under its name in config.json (`quantization_config.quant_method`). Methods import what they
need, because drivers run without torch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from slimx import entry_points
from slimx.json_types import Json
from slimx.layout.table import Stored, Table

if TYPE_CHECKING:
    import torch

    from slimx.config.schema import Config
    from slimx.layout.ranks import Sizes

GROUP = "slimx.number_formats"
StoredTensors = dict[str, tuple[tuple[int, ...], Collection[str]]]
"""Name of a stored tensor -> its shape and its permitted dtypes, in the notation of safetensors."""
ModelDtype = Literal["float32", "bfloat16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""Dtype in which weights are published -> bytes per element."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization that a publication applies to a matrix: its elements become codes, and each block gets one scale."""

    rule: str
    """Name of the rule by which a block's scale is computed (docs/numerics.md)."""
    block: tuple[int, int]
    """(rows, columns) of a block."""
    operation: str
    """Name of the op with which the packing kernels quantize, a member of `slimx.reshard.kernels.record.OP`."""
    code_dtype: str
    """Dtype of the codes."""
    scale_dtype: str
    suffixes: tuple[str, str]
    """Suffixes that are appended to a tensor's name for its codes and for its scales."""
    per_code: int = 1
    """Number of matrix columns packed into one element of the code tensor, such as 2 if an element packs two INT4
    codes."""

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the codes and of the scales for a tensor of shape `shape`, [..., rows, cols]."""
        *stack, rows, cols = shape
        high, wide = self.block
        return (*stack, rows, cols // self.per_code), (*stack, -(-rows // high), -(-cols // wide))


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the trainer's and the engines' weights, and the quantization applied to weights that the family's
    published checkpoints quantize.

    `quantization` is None if a publication sends plain values."""

    trainer: ModelDtype
    engine: ModelDtype
    quantization: Quantization | None = None


class TensorSlice(Protocol):
    """A tensor in a safetensors file whose parts can be read separately."""

    def get_shape(self) -> list[int]:
        """Returns the tensor's shape."""

    def get_dtype(self) -> str:
        """Returns the tensor's dtype in the notation of safetensors."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class TensorFiles(Protocol):
    """Access to the tensors of a checkpoint, implemented by `slimx.models.files.reader.CheckpointReader`."""

    path: Path

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors in the checkpoint."""

    @property
    def config(self) -> Json:
        """Contents of the checkpoint's config.json."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape in which tensor `name` is stored."""

    def whole(self, name: str) -> torch.Tensor:
        """Reads the whole of tensor `name` and returns it in the dtype in which it is stored."""

    def view(self, name: str) -> TensorSlice:
        """Returns a view of tensor `name`, from which parts can be read."""


class NumberFormat:
    """Base class of number formats; represents plain values, which are stored without codes and scales."""

    RULES: ClassVar[Collection[str]] = ()
    """Values of `publish.quantize` with which a publication quantizes weights to this format."""
    GROUP: ClassVar[int] = 1
    """Required divisor of the number of columns in a quantized matrix."""
    CONVERTED: ClassVar[bool] = False
    """True if only `slimx convert` reads checkpoints of this format, and trainers cannot load them."""
    LOCAL: ClassVar[bool] = False
    """True if engines load codes of this format only under the engines' parameter names and in the engines' layout
    (`publish.encoding: local`)."""
    IGNORED: ClassVar[Collection[str]] = ()
    """Names of parameters that SGLang creates for this format in addition to codes and scales, but never reads."""

    def other_scheme(self, described: Json) -> str | None:
        """Returns, for an error message, the name and value of the first unsupported field in `described`, a
        checkpoint's `quantization_config`; None if this format supports all fields."""
        return None

    # Checkpoints

    def holds(self, files: TensorFiles, name: str) -> bool:
        """Returns True if `files` stores tensor `name` of a weight table in this format."""
        return False

    def tensors(self, files: TensorFiles, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        """Returns the tensors in which this format stores tensor `name`, whose shape in the weight table is `shape`.

        `transposed`: True if `name` is a stack of transposed matrices."""
        raise NotImplementedError

    def read(self, files: TensorFiles, source: Stored, rows: slice, cols: slice) -> torch.Tensor:
        """Reads the rows `rows` and columns `cols` of `source`, a source of a weight table, and returns them as plain
        values, [rows, cols]."""
        raise NotImplementedError

    def refuse(self, path: Path, unknown: Sequence[str]) -> None:
        """Raises SlimxError with a remedy if this format accounts for some of `unknown`, names of tensors in the
        checkpoint `path` that a trainer cannot load."""

    # Publications

    def quantization(self, rule: str) -> Quantization | None:
        """Returns the quantization that a publication with rule `rule` applies to the table's quantized rows; None if
        it sends plain values."""
        return None

    def chosen(self, table: Table) -> Table:
        """Returns `table` with `quantized` set for exactly the rows that engines store in this format."""
        return table

    def nearest(self, config: Config, sizes: Sizes) -> Iterable[tuple[str, Config, Sizes]]:
        """Returns alternatives to `config`, whose parallel sizes split quantization blocks, the most similar first.
        Each is a tuple (assignment of the changed key as text, changed configuration, its trainer sizes), which the
        caller must check: it may still split blocks. `sizes`: trainer sizes in `config`."""
        return ()

    # Engines

    def codes_of(self, parameter: str) -> str | None:
        """Returns the name of the SGLang parameter to whose values the scales in SGLang's `parameter` apply; None if
        `parameter` contains no scales of this format."""
        return None

    def scales[Piece](self, pieces: Iterable[Piece], owner: object) -> Iterator[Piece]:
        """Yields the parts of Hugging Face tensors (`slimx.adapters.sglang.weights.layout.ServedPiece`) that an
        engine's scale parameter stores.

        `pieces`: parts that the matching parameter with the quantized codes stores. `owner`: SGLang's module that
        contains both parameters. Raises SlimxError if a piece splits a quantization block."""
        raise NotImplementedError


@functools.cache
def all_formats() -> Mapping[str, NumberFormat]:
    """Returns all number formats; the keys are their names in config.json."""
    return entry_points.load_all(GROUP)


def published_format(rule: str | None) -> NumberFormat:
    """Returns the number format of weights published with `rule`, a value of `publish.quantize`; the format of plain
    values if `rule` is None."""
    for number_format in all_formats().values():
        if rule in number_format.RULES:
            return number_format
    return NumberFormat()
