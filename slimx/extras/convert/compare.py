"""Comparison of a conversion's output, read again like any program would, with its source.

Checksums prove that a disk stored the bytes that were written, not that these were right. No code here is shared with
the writers: outputs are read through their headers, and torch dequantizes codes.
"""

from __future__ import annotations

import torch

from slimx.errors import SlimxError
from slimx.extras.convert.sources import Advance, Reading, Shape, row_blocks
from slimx.extras.low_precision.int4 import GROUP
from slimx.models.files.reader import bits

_RELATIVE = 2.0**-4 + 2.0**-8
"""Largest relative error of a value: half of e4m3's last place, and of bf16's, the dtype in which codes are read."""
_OF_SCALE = 2.0**-8
"""Bound of a small value's error in units of its scale: half the spacing of e4m3's subnormal numbers (2^-9), doubled
because ue8m0 may halve the scale after rounding, plus room for bf16's rounding."""

_OF_INT4_SCALE = 0.5 + 0.125
"""Largest error of a value in INT4 in units of amax / 7; a wrong code exceeds it."""
_LEAST_BF16 = 2.0**-123
"""Largest error of values that become zero because their group's scale is subnormal."""


def compare_copied(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    source: Reading,
    written: Reading,
    advance: Advance,
) -> None:
    """Raises SlimxError unless `written` has tensor `name` in `dtype`, with the source's values, rounded if needed."""
    actual = written.dtype(name)
    if actual != dtype:
        raise differs(name, f"it is {actual}, not {dtype}")
    for rect in row_blocks(shape, 4):
        expected = source.read(name, rect).to(dtype)
        part = written.read(name, rect)
        if not torch.equal(bits(expected), bits(part)):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} differ from the source's values")
        advance(part.nbytes)


def compare_quantized(
    name: str,
    shape: Shape,
    block: tuple[int, int],
    source: Reading,
    written: Reading,
    scales: torch.Tensor,
    advance: Advance,
) -> None:
    """Raises SlimxError unless every value of the quantized tensor `name`, with `scales` [block rows, block cols], is
    within e4m3 rounding of the source's."""
    high, wide = block
    for rect in row_blocks(shape, 4, multiple=high):
        expected = source.read(name, rect).float()
        part = written.read(name, rect).float()
        rows = scales[rect.row // high :][: -(-rect.rows // high)]
        spread = rows.repeat_interleave(high, 0)[: rect.rows].repeat_interleave(wide, 1)[:, : rect.cols]
        allowed = torch.maximum(expected.abs() * _RELATIVE, spread * _OF_SCALE)
        if not bool(((part - expected).abs() <= allowed).all()):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} are not the source's values in fp8")
        advance(rect.rows * rect.cols)


def compare_int4(name: str, shape: Shape, source: Reading, written: Reading, advance: Advance) -> None:
    """Raises SlimxError unless every value of the tensor `name` in INT4 is within rounding of the source's: half a
    scale, plus bf16's rounding of element, quotient and value."""
    for rect in row_blocks(shape, 4):
        expected = source.read(name, rect).float()
        part = written.read(name, rect).float()
        groups = expected.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        allowed = _OF_INT4_SCALE * scale + _LEAST_BF16
        if not bool(((part.unflatten(1, (-1, GROUP)) - groups).abs() <= allowed).all()):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} are not the source's values in INT4")
        advance(rect.rows * rect.cols)


def differs(name: str, difference: str) -> SlimxError:
    """Builds the refusal of an output whose tensor `name` has other values than the source's."""
    return SlimxError(
        f"tensor {name} of the output differs from the source: {difference}; do not use the output, and report this "
        "with the "
        "source's config.json",
        code="convert.values",
        about=name,
    )
