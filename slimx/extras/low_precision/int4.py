"""The number format INT4 of compressed-tensors, as in Kimi-K2.5's experts: `pack-quantized`, symmetric, with one scale
per 32 columns.

Three tensors store a matrix NAME. `NAME_packed` [rows, cols / 8] contains eight codes per int32, the first in the
lowest bits, each with 8 added. `NAME_scale` [rows, cols / 32] contains their scales, and `NAME_shape` [2] the matrix's
rows and columns. A value is code * scale, rounded to bf16. Only matrices of routed experts are quantized, as in
Kimi-K2-Thinking's checkpoints.
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
"""Suffix that is appended to a matrix's name to form the name of its codes."""
SCALES = "_scale"
"""Suffix that is appended to a matrix's name to form the name of its scales."""
SHAPE = "_shape"
"""Suffix that is appended to a matrix's name to form the name of its shape tensor."""
DTYPES = {CODES: ("I32",), SCALES: ("BF16",), SHAPE: ("I32", "I64")}
"""Suffix -> accepted dtypes of the tensor with this suffix, as named in safetensors files."""
PER_WORD = 8
"""Number of INT4 codes packed into one int32."""
GROUP = 32
"""Number of adjacent values of a row that share one scale."""
SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
"""Values that the fields of `weights` must have in a compressed-tensors config group."""


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, by suffix, of the three tensors that store a matrix of shape `shape`, whose number of columns
    is a multiple of GROUP."""
    rows, cols = shape
    return {CODES: (rows, cols // PER_WORD), SCALES: (rows, cols // GROUP), SHAPE: (2,)}


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the values, bf16 [rows, words * 8], of int32 `codes` [rows, words] with bf16 `scales` [rows, words /
    4]."""
    import torch  # not at module level, because plans use only the shapes, without torch

    shifts = torch.arange(0, 32, 32 // PER_WORD, dtype=torch.int32)
    values = ((codes.unsqueeze(-1) >> shifts) & 0xF) - 8
    grouped = values.view(len(codes), -1, GROUP).to(torch.float32) * scales.float().unsqueeze(-1)
    return grouped.flatten(1).to(torch.bfloat16)


def rounds(row: Row) -> bool:
    """Returns True if INT4 quantization applies to the tensors of the weight-table row `row`: matrices of routed
    experts that are separate tensors in the checkpoint."""
    matrices = all(len(shape) == 2 for _, shape in row.sources)
    return row.per_expert and matrices and stored(row.names(0, 0)[0]).index is None


def experts(table: Table) -> Iterator[Entry]:
    """Yields the tensors in weight table `table` to which INT4 quantization applies."""
    return (entry for entry in table.entries() if rounds(entry.row))


def rounded_parts(table: Table, parts: Iterable[Part]) -> list[Part]:
    """Returns those of `parts`, a rank's parts of checkpoint tensors, to which INT4 quantization applies."""
    sources = {entry.sources for entry in experts(table)}
    return [part for part in parts if part.sources in sources]


QUANTIZATION = Quantization("int4", (1, GROUP), "QUANTIZE_INT4", "uint8", "bfloat16", (CODES, SCALES), per_code=2)


class Int4(NumberFormat):
    """Number format of checkpoints with `quant_method: compressed-tensors` and the scheme `SCHEME` in config.json."""

    RULES: ClassVar[tuple[str, ...]] = ("int4",)
    GROUP: ClassVar[int] = GROUP
    LOCAL: ClassVar[bool] = True
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        f"{weight}_{suffix}"
        for weight in ("w13", "w2")
        for suffix in ("weight_shape", "weight_g_idx", "g_idx_sort_indices")
    )
    """Names of SGLang's parameters for shapes and column orders, which the Triton kernel never reads."""

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
