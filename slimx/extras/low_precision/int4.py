"""INT4 of compressed-tensors (Kimi-K2.5's experts): the format pack-quantized with a symmetric scale per 32 columns.

`NAME_packed` [rows, cols / 8] has eight codes per int32, the lowest bits first, each with 8 added; `NAME_scale` [rows,
cols / 32] their scales; `NAME_shape` [2] rows and columns. A value is code * scale, rounded to bf16. Only matrices of
routed experts are rounded, as in Kimi-K2-Thinking's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from slimx.layout.number_formats import NumberFormat, Quantization, StoredTensors
from slimx.layout.parts import Part
from slimx.layout.table import Entry, Row, Stored, Table, stored

if TYPE_CHECKING:
    import torch

    from slimx.config.schema import Config
    from slimx.layout.ranks import Sizes

CODES = "_packed"
"""Suffix of a matrix's name for its codes."""
SCALES = "_scale"
"""Suffix of a matrix's name for its scales."""
SHAPE = "_shape"
"""Suffix of a matrix's name for its shape."""
DTYPES = {CODES: ("I32",), SCALES: ("BF16",), SHAPE: ("I32", "I64")}
"""Dtypes of the three tensors, by their names in safetensors files."""
PER_WORD = 8
"""Codes per int32."""
GROUP = 32
"""Values per scale."""
SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
"""Fields of `weights` in a config group of compressed-tensors."""


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns suffix -> shape of the three tensors that store a matrix of `shape`, whose columns GROUP divides."""
    rows, cols = shape
    return {CODES: (rows, cols // PER_WORD), SCALES: (rows, cols // GROUP), SHAPE: (2,)}


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns values, bf16 [rows, words * 8], of int32 codes [rows, words] and bf16 scales [rows, words / 4]."""
    import torch  # imported here because a plan needs the shapes only, without torch

    shifts = torch.arange(0, 32, 32 // PER_WORD, dtype=torch.int32)
    values = ((codes.unsqueeze(-1) >> shifts) & 0xF) - 8
    grouped = values.view(len(codes), -1, GROUP).to(torch.float32) * scales.float().unsqueeze(-1)
    return grouped.flatten(1).to(torch.bfloat16)


def rounds(row: Row) -> bool:
    """Returns True if the tensors of `row` are rounded to INT4: per-expert matrices that are not stacked in the
    checkpoint."""
    matrices = all(len(shape) == 2 for _, shape in row.sources)
    return row.per_expert and matrices and stored(row.names(0, 0)[0]).index is None


def experts(table: Table) -> Iterator[Entry]:
    """Returns the tensors of the model that INT4 rounds."""
    return (entry for entry in table.entries() if rounds(entry.row))


def rounded_parts(table: Table, parts: Iterable[Part]) -> list[Part]:
    """Returns the parts of a rank that INT4 rounds."""
    sources = {entry.sources for entry in experts(table)}
    return [part for part in parts if part.sources in sources]


QUANTIZATION = Quantization("int4", (1, GROUP), "QUANTIZE_INT4", "uint8", "bfloat16", (CODES, SCALES), per_code=2)


class Int4(NumberFormat):
    """The format with `quant_method` compressed-tensors in config.json."""

    RULES: ClassVar[tuple[str, ...]] = ("int4",)
    GROUP: ClassVar[int] = GROUP
    LOCAL: ClassVar[bool] = True
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        f"{weight}_{suffix}"
        for weight in ("w13", "w2")
        for suffix in ("weight_shape", "weight_g_idx", "g_idx_sort_indices")
    )
    """Shapes and orders of columns, which Triton's kernel never reads."""

    def other_scheme(self, described: Mapping[str, Any]) -> str | None:
        method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        for key, expected in method.items():
            if described.get(key) != expected:
                return f"quantization_config.{key} {described.get(key)}"
        scheme = {**SCHEME, "actorder": None}
        for name, group in (described.get("config_groups") or {}).items():
            field = f"quantization_config.config_groups.{name}"
            if group.get("input_activations") is not None:
                return f"{field}.input_activations"
            weights = group.get("weights") or {}
            for key, value in scheme.items():
                if weights.get(key) != value:
                    return f"{field}.weights.{key} {weights.get(key)}"
        return None

    def holds(self, files: Any, name: str) -> bool:
        return name not in files.names and name + CODES in files.names

    def tensors(self, files: Any, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        if len(shape) != 2:
            return {name: (shape, ())}
        return {name + suffix: (packed, DTYPES[suffix]) for suffix, packed in packed_shapes(shape).items()}

    def read(self, files: Any, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        first = cols.start // GROUP
        stop = -(-cols.stop // GROUP)
        words = GROUP // PER_WORD
        codes = files.view(place.name + CODES)[rows, first * words : stop * words]
        values = dequantize(codes, files.view(place.name + SCALES)[rows, first:stop])
        start = first * GROUP
        return values[:, cols.start - start : cols.stop - start]

    def nearest(self, config: Config, sizes: Sizes) -> Iterator[tuple[str, Config, Sizes]]:
        from slimx.extras.low_precision.nearest import nearest

        return nearest(config, sizes)

    def quantization(self, rule: str) -> Quantization:
        return QUANTIZATION

    def chosen(self, table: Table) -> Table:
        return replace(table, rows=tuple(replace(row, quantized=rounds(row)) for row in table.rows))


FORMAT = Int4()
