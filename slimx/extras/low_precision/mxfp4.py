"""MXFP4 in checkpoints (gpt-oss's experts): four-bit floats with a scale per 32 of them.

`NAME_blocks` [..., rows, groups, 16] has two E2M1 codes per byte, the low half first; `NAME_scales` [..., rows, groups]
one power of two per group, E8M0 with bias 127 (OCP Microscaling Formats v1.0). Each value is exact in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from slimx.layout.number_formats import NumberFormat, StoredTensors
from slimx.layout.table import Stored

if TYPE_CHECKING:
    import torch

BLOCKS = "_blocks"
"""Suffix of a tensor's name for its codes."""
SCALES = "_scales"
"""Suffix of a tensor's name for its scales."""
GROUP = 32
"""Values per scale."""
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the eight codes without a sign bit."""


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns suffix -> shape of the two tensors that store a tensor of `shape`, whose last dimension GROUP divides."""
    groups = (*shape[:-1], shape[-1] // GROUP)
    return {BLOCKS: (*groups, GROUP // 2), SCALES: groups}


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns values, bf16 [..., groups * 32], of uint8 codes [..., groups, 16] and scales [..., groups]."""
    import torch  # imported here because a plan needs the shapes only, without torch

    table = torch.tensor(_VALUES)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2).long()
    values = torch.ldexp(torch.cat([table, -table])[codes], (scales.int() - _BIAS).unsqueeze(-1))
    return values.flatten(-2).to(torch.bfloat16)


class Mxfp4(NumberFormat):
    """Stacks of matrices in this format, which slimx reads but never writes."""

    GROUP: ClassVar[int] = GROUP

    def holds(self, files: Any, name: str) -> bool:
        return name not in files.names and name + BLOCKS in files.names

    def tensors(self, files: Any, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        if not transposed:
            return {name: (shape, ())}
        count, rows, cols = shape
        return {name + suffix: (packed, ("U8",)) for suffix, packed in packed_shapes((count, cols, rows)).items()}

    def read(self, files: Any, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        """Reads values. Stored matrices are transposed relative to the stack, as the table's sources are."""
        if place.index is None:
            raise NotImplementedError("MXFP4 tensors are stacks of matrices")
        first = cols.start // GROUP
        stop = -(-cols.stop // GROUP)
        window = slice(place.index, place.index + 1), rows, slice(first, stop)
        blocks = files.view(place.name + BLOCKS)[window]
        scales = files.view(place.name + SCALES)[window]
        start = first * GROUP
        return dequantize(blocks, scales)[0, :, cols.start - start : cols.stop - start]


FORMAT = Mxfp4()
