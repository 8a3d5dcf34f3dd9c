"""Number formats in which weights travel: dtypes of trainers and engines, and those that hold a matrix as codes and
scales.

A format is an object of a class derived from `NumberFormat`, and an entry point of the group `slimx.number_formats`,
with the name that config.json has for it (`quantization_config.quant_method`). Methods import what they need: drivers
do without torch.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from slimx import entry_points
from slimx.layout.table import Stored, Table

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.layout.ranks import Sizes

GROUP = "slimx.number_formats"
StoredTensors = dict[str, tuple[tuple[int, ...], Collection[str]]]
"""Name -> shape and possible dtypes, as safetensors files name them."""
ModelDtype = Literal["float32", "bfloat16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""Bytes of an element, by dtypes in which weights travel."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The codes that a publication makes of a matrix, and their scales, one for each block."""

    rule: str
    """The choice of a block's scale (docs/numerics.md)."""
    block: tuple[int, int]
    """Rows and columns of a block in elements."""
    operation: str
    """Name in `slimx.reshard.kernels.record.OP`."""
    code_dtype: str
    """Dtype of an element of codes."""
    scale_dtype: str
    suffixes: tuple[str, str]
    """Suffixes of a tensor's name for its codes and for its scales."""
    per_code: int = 1
    """Columns of a matrix that one element of codes holds."""

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the codes and of the scales of a tensor [..., rows, cols]."""
        (*stack, rows, cols), (high, wide) = shape, self.block
        return (*stack, rows, cols // self.per_code), (*stack, -(-rows // high), -(-cols // wide))


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtype of the trainer's weights, dtype of the engine's, and how those that the family quantises are quantised."""

    trainer: ModelDtype
    engine: ModelDtype
    quantisation: Quantisation | None = None


class NumberFormat:
    """Plain values."""

    RULES: ClassVar[Collection[str]] = ()
    """Rules by which a publication makes such codes: values of `publish.quantise`."""
    GROUP: ClassVar[int] = 1
    """Divisor of the columns of a matrix."""
    CONVERTED: ClassVar[bool] = False
    """True if trainers do not start from it: conversions alone read it."""
    LOCAL: ClassVar[bool] = False
    """True if engines take such codes in their own layout alone."""
    IGNORED: ClassVar[Collection[str]] = ()
    """Names of parameters that SGLang has beside the codes and never reads."""

    def other_scheme(self, described: Mapping[str, Any]) -> str | None:
        """The first field of a `quantization_config` that describes another scheme than this one, with its value."""
        return None

    # Checkpoints; `files` is a `slimx.models.files.reader.CheckpointReader`

    def holds(self, files: Any, name: str) -> bool:
        """Returns True if tensor `name` of a weight table is stored so."""
        return False

    def tensors(self, files: Any, name: str, shape: tuple[int, ...], *, turned: bool) -> StoredTensors:
        """Tensors that store tensor `name`, whose shape in a weight table is `shape`; `turned`: it is a stack of
        transposed matrices."""
        raise NotImplementedError

    def read(self, files: Any, place: Stored, rows: slice, cols: slice) -> Any:
        """The values [rows, cols] of a source of a weight table."""
        raise NotImplementedError

    def refuse(self, path: Path, unknown: Sequence[str]) -> None:
        """Raises SlimxError if the tensors `unknown` of a checkpoint that is no conversion's are of this format."""

    # Publications

    def quantisation(self, rule: str) -> Quantisation | None:
        """The codes that a publication by `rule` makes of the rows of a table that are quantised; None: none."""
        return None

    def chosen(self, table: Table) -> Table:
        """The same table, with those rows quantised that engines hold so."""
        return table

    def nearest(self, config: Config, sizes: Sizes) -> Iterable[tuple[str, Config, Sizes]]:
        """Other values of a key, the configuration that has them, and the trainers' sizes then, the nearest first: for
        a `config` with trainers of `sizes` that cuts blocks."""
        return ()

    # Engines

    def codes_of(self, parameter: str) -> str | None:
        """Name of the parameter whose scales SGLang holds as `parameter`; None: they are no scales of this format."""
        return None

    def scales(self, pieces: Iterable[Any], owner: Any) -> Iterator[Any]:
        """Pieces (`slimx.adapters.sglang.weights.layout.ServedPiece`) of a parameter of scales, from those of the
        codes in the module `owner`. Raises SlimxError where a piece cuts a block."""
        raise NotImplementedError


@functools.cache
def all_formats() -> Mapping[str, NumberFormat]:
    """Returns all formats by their names in config.json."""
    return entry_points.load_all(GROUP)


def published_format(rule: str | None) -> NumberFormat:
    """Returns the format of publications by `rule`, a value of `publish.quantise`."""
    return next((each for each in all_formats().values() if rule in each.RULES), NumberFormat())
