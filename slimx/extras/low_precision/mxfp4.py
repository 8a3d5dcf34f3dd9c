"""The number format MXFP4, as in the checkpoints of gpt-oss's experts: four-bit floats with one scale per 32 values.

`NAME_blocks` [..., rows, groups, 16] contains two E2M1 codes per byte, the first in the low half. `NAME_scales` [...,
rows, groups] contains one power of two per group, as E8M0 with bias 127 (OCP Microscaling Formats v1.0). bf16
represents each value exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from slimx.layout.number_formats import NumberFormat, StoredTensors
from slimx.layout.table import Stored

if TYPE_CHECKING:
    import torch

BLOCKS = "_blocks"
"""Suffix that is appended to a quantized tensor's name to form the name of its codes."""
SCALES = "_scales"
"""Suffix that is appended to a quantized tensor's name to form the name of its scales."""
GROUP = 32
"""Number of adjacent values of a row that share one scale."""
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the eight E2M1 codes whose sign bit is 0."""


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, by suffix, of the two tensors that store a tensor of shape `shape`, whose last dimension is a
    multiple of GROUP."""
    groups = (*shape[:-1], shape[-1] // GROUP)
    return {BLOCKS: (*groups, GROUP // 2), SCALES: groups}


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the values, bf16 [..., groups * 32], of uint8 codes `blocks` [..., groups, 16] with uint8 `scales` [...,
    groups]."""
    import torch  # not at module level, because plans use only the shapes, without torch

    table = torch.tensor(_VALUES)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2).long()
    values = torch.ldexp(torch.cat([table, -table])[codes], (scales.int() - _BIAS).unsqueeze(-1))
    return values.flatten(-2).to(torch.bfloat16)


class Mxfp4(NumberFormat):
    """Number format of checkpoints with `quant_method: mxfp4` in config.json. It stores stacks of matrices, which slimx
    reads but never writes."""

    GROUP: ClassVar[int] = GROUP

    def holds(self, files: Any, name: str) -> bool:
        return name not in files.names and name + BLOCKS in files.names

    def tensors(self, files: Any, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        if not transposed:
            return {name: (shape, ())}
        count, rows, cols = shape
        return {name + suffix: (packed, ("U8",)) for suffix, packed in packed_shapes((count, cols, rows)).items()}

    def read(self, files: Any, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        """Returns the bf16 values of rows `rows` and columns `cols` of the matrix stored at `place`. Files store each
        matrix in the orientation of the weight table's source."""
        if place.index is None:
            raise NotImplementedError(
                f"{place.name} is not part of a stack of matrices, as MXFP4 requires; restore the checkpoint from its "
                "source"
            )
        first = cols.start // GROUP
        stop = -(-cols.stop // GROUP)
        window = slice(place.index, place.index + 1), rows, slice(first, stop)
        blocks = files.view(place.name + BLOCKS)[window]
        scales = files.view(place.name + SCALES)[window]
        start = first * GROUP
        return dequantize(blocks, scales)[0, :, cols.start - start : cols.stop - start]


FORMAT = Mxfp4()
