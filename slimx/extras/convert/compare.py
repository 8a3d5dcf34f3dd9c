"""Comparison of a conversion's output, read again as any program reads it, with its source.

Checksums show that a disk kept the bytes that were written; they cannot show that these were the right ones. Nothing
here is shared with the writers: outputs are read by their own headers, and codes are taken back to values by torch.
"""

from __future__ import annotations

import torch

from slimx.errors import SlimxError
from slimx.extras.convert.sources import Advance, Reading, Shape, row_blocks
from slimx.extras.low_precision.int4 import GROUP
from slimx.models.files.reader import bits

_RELATIVE = 2.0**-4 + 2.0**-8
"""Largest relative error of a value: half of e4m3's last place, and of bf16's, in which codes are read."""
_OF_SCALE = 2.0**-8
"""Largest error in units of the scale: twice half the distance of e4m3's smallest numbers (2^-9), since ue8m0 may halve
the scale after it has rounded; and bf16's rounding."""

_OF_INT4_SCALE = 0.5 + 0.125
"""Largest error of a value in INT4 in units of amax / 7: a code that is off by one is off by more."""
_LEAST_BF16 = 2.0**-123
"""Largest error of the zeros that groups with a subnormal scale become."""


def compare_copied(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    source: Reading,
    written: Reading,
    advance: Advance,
) -> None:
    """Raises SlimxError unless `written` has tensor `name` in `dtype`, each value the source's, rounded if it must."""
    if (found := written.dtype(name)) != dtype:
        raise differs(name, f"it is {found}, not {dtype}")
    for rect in row_blocks(shape, 4):
        wanted, part = source.read(name, rect).to(dtype), written.read(name, rect)
        if not torch.equal(bits(wanted), bits(part)):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} do not hold the source's values")
        advance(part.nbytes)


def compare_quantised(
    name: str,
    shape: Shape,
    block: tuple[int, int],
    source: Reading,
    written: Reading,
    scales: torch.Tensor,
    advance: Advance,
) -> None:
    """Raises SlimxError unless every value of the quantised tensor `name`, with `scales` [block rows, block cols], is
    within a rounding to e4m3 of the source's."""
    for rect in row_blocks(shape, 4, multiple=block[0]):
        wanted, part = source.read(name, rect).float(), written.read(name, rect).float()
        own = scales[rect.row // block[0] :][: -(-rect.rows // block[0])]
        spread = own.repeat_interleave(block[0], 0)[: rect.rows].repeat_interleave(block[1], 1)[:, : rect.cols]
        allowed = torch.maximum(wanted.abs() * _RELATIVE, spread * _OF_SCALE)
        if not bool(((part - wanted).abs() <= allowed).all()):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} are not the source's values in fp8")
        advance(rect.rows * rect.cols)


def compare_int4(name: str, shape: Shape, source: Reading, written: Reading, advance: Advance) -> None:
    """Raises SlimxError unless every value of the tensor `name` in INT4 is within a rounding of the source's: half a
    scale, and what bf16 rounds of an element, of its quotient and of its value."""
    for rect in row_blocks(shape, 4):
        wanted, part = source.read(name, rect).float(), written.read(name, rect).float()
        groups = wanted.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        allowed = _OF_INT4_SCALE * scale + _LEAST_BF16
        if not bool(((part.unflatten(1, (-1, GROUP)) - groups).abs() <= allowed).all()):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} are not the source's values in INT4")
        advance(rect.rows * rect.cols)


def differs(name: str, how: str) -> SlimxError:
    """The refusal of an output whose tensor `name` has other values than the source's."""
    return SlimxError(
        f"tensor {name} of the output is not the source's: {how}; do not use the output, and report this with the "
        "source's config.json",
        code="convert.values",
        about=name,
    )
