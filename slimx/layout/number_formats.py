"""Number formats of weights: dtypes of trainers and engines, and formats that store a matrix as codes and scales.

A format is an object of a subclass of `NumberFormat`, and an entry point of the group `slimx.number_formats`, named as
in config.json (`quantization_config.quant_method`). Methods import what they need, because drivers run without torch.
"""

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
"""Name -> shape and possible dtypes, as named in safetensors files."""
ModelDtype = Literal["float32", "bfloat16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""Bytes per element, by the dtypes in which weights are sent."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Codes that a publication computes from a matrix, and their scales, one per block."""

    rule: str
    """Rule that chooses a block's scale (docs/numerics.md)."""
    block: tuple[int, int]
    """Rows and columns of a block in elements."""
    operation: str
    """Name in `slimx.reshard.kernels.record.OP`."""
    code_dtype: str
    """Dtype of an element of codes."""
    scale_dtype: str
    suffixes: tuple[str, str]
    """Suffixes of a tensor's name for its codes and its scales."""
    per_code: int = 1
    """Matrix columns that one element of codes holds."""

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of codes and scales of a tensor [..., rows, cols]."""
        *stack, rows, cols = shape
        high, wide = self.block
        return (*stack, rows, cols // self.per_code), (*stack, -(-rows // high), -(-cols // wide))


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the trainer's and the engine's weights, and the quantization of weights that the family quantizes."""

    trainer: ModelDtype
    engine: ModelDtype
    quantization: Quantization | None = None


class TensorSlice(Protocol):
    """A tensor in a safetensors file, of which parts can be read."""

    def get_shape(self) -> list[int]:
        """Returns its shape."""
        ...

    def get_dtype(self) -> str:
        """Returns its dtype as safetensors names it."""
        ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class TensorFiles(Protocol):
    """The tensors of a checkpoint (`slimx.models.files.reader.CheckpointReader`)."""

    path: Path

    @property
    def names(self) -> Collection[str]:
        """Every tensor of the checkpoint."""
        ...

    @property
    def config(self) -> Json:
        """The checkpoint's config.json."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of tensor `name`."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """Returns a whole tensor as it is stored."""
        ...

    def view(self, name: str) -> TensorSlice:
        """Returns tensor `name` as its file stores it."""
        ...


class NumberFormat:
    """Plain values; the base class of formats."""

    RULES: ClassVar[Collection[str]] = ()
    """Rules by which a publication computes these codes: values of `publish.quantize`."""
    GROUP: ClassVar[int] = 1
    """Divisor of the columns of a matrix."""
    CONVERTED: ClassVar[bool] = False
    """True if trainers cannot start from this format: only conversions read it."""
    LOCAL: ClassVar[bool] = False
    """True if engines load these codes only in their own layout."""
    IGNORED: ClassVar[Collection[str]] = ()
    """Names of parameters that SGLang has in addition to the codes and never reads."""

    def other_scheme(self, described: Json) -> str | None:
        """Returns the first field of a `quantization_config` that describes a different scheme, with its value; None if
        it describes this format."""
        return None

    # Checkpoints

    def holds(self, files: TensorFiles, name: str) -> bool:
        """Returns True if tensor `name` of a weight table is stored in this format."""
        return False

    def tensors(self, files: TensorFiles, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        """Returns the tensors that store tensor `name`, whose shape in a weight table is `shape`. `transposed`: it is a
        stack of transposed matrices."""
        raise NotImplementedError

    def read(self, files: TensorFiles, source: Stored, rows: slice, cols: slice) -> torch.Tensor:
        """Returns the values [rows, cols] of a source of a weight table."""
        raise NotImplementedError

    def refuse(self, path: Path, unknown: Sequence[str]) -> None:
        """Raises SlimxError if the tensors `unknown` of a checkpoint, which is not for conversion, have this format."""

    # Publications

    def quantization(self, rule: str) -> Quantization | None:
        """Returns the codes that a publication by `rule` computes from the quantized rows of a table; None without
        quantization."""
        return None

    def chosen(self, table: Table) -> Table:
        """Returns the same table with the rows quantized that engines hold in this format."""
        return table

    def nearest(self, config: Config, sizes: Sizes) -> Iterable[tuple[str, Config, Sizes]]:
        """Returns alternatives for a `config` whose trainers of `sizes` cut blocks, the nearest first: a key's
        assignment in words, the configuration that has it, and the trainers' sizes."""
        return ()

    # Engines

    def codes_of(self, parameter: str) -> str | None:
        """Returns the name of the parameter whose scales SGLang holds as `parameter`; None if they are not scales of
        this format."""
        return None

    def scales[Piece](self, pieces: Iterable[Piece], owner: object) -> Iterator[Piece]:
        """Yields pieces (`slimx.adapters.sglang.weights.layout.ServedPiece`) of a parameter of scales from those of the
        codes in the module `owner`. Raises SlimxError if a piece cuts a block."""
        raise NotImplementedError


@functools.cache
def all_formats() -> Mapping[str, NumberFormat]:
    """Returns all formats by their names in config.json."""
    return entry_points.load_all(GROUP)


def published_format(rule: str | None) -> NumberFormat:
    """Returns the number format in which `rule`, a value of `publish.quantize`, publishes weights."""
    for number_format in all_formats().values():
        if rule in number_format.RULES:
            return number_format
    return NumberFormat()
