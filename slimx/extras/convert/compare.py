"""Comparison of a conversion's output with its source. The output is read as any other program would read it.

Checksums verify that a disk stored the bytes that were written, not that these bytes were correct. The comparison
shares no code with the writers: it reads the output through the headers of its files, and torch dequantizes the codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimx.errors import SlimxError
from slimx.extras.convert.sources import Advance, Reading, Shape, row_blocks
from slimx.extras.low_precision.int4 import GROUP
from slimx.layout.maps import Rect
from slimx.models.files.reader import bits

_RELATIVE = 2.0**-4 + 2.0**-8
"""Maximum relative error of an fp8 value: half an ulp of e4m3, plus the rounding error of bf16, the dtype in which
quantized values are read."""
_OF_SCALE = 2.0**-8
"""Maximum error of a small value in fp8, in units of its scale: half the spacing of e4m3's subnormal numbers (2^-9),
doubled because ue8m0 may halve the scale after rounding, plus a margin for bf16's rounding."""

_OF_INT4_SCALE = 0.5 + 0.125
"""Maximum error of an INT4 value, in units of its group's amax / 7; a wrong code causes a larger error."""
_LEAST_BF16 = 2.0**-123
"""Maximum absolute error of values that become 0 because their group's scale is subnormal."""


def compare_copied(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    source: Reading,
    written: Reading,
    advance: Advance,
) -> None:
    """Raises SlimxError unless `written` has the tensor `name` in `dtype`, with the values of the tensor in `source`,
    rounded to `dtype` if needed. `advance`: receives the number of compared bytes."""
    actual = written.dtype(name)
    if actual != dtype:
        raise differs(name, f"it is {actual}, not {dtype}")
    for rect in row_blocks(shape, 4):
        expected = source.read(name, rect).to(dtype)
        part = written.read(name, rect)
        if not torch.equal(bits(expected), bits(part)):
            raise differs(name, f"rows {rect.row} to {rect.row + rect.rows - 1} have different values")
        advance(part.nbytes)


def compare_quantized(
    name: str,
    shape: Shape,
    block: tuple[int, int],
    source: Callable[[Rect], torch.Tensor],
    written: Reading,
    scales: torch.Tensor,
    advance: Advance,
) -> None:
    """Raises SlimxError unless every value of the quantized tensor `name` equals its source up to e4m3 rounding.

    `source`: function that reads the source's values in a rectangle of the tensor. `scales` [block rows, block cols]:
    scales of the written tensor. `advance`: receives the number of compared bytes."""
    high, wide = block
    for rect in row_blocks(shape, 4, multiple=high):
        expected = source(rect).float()
        part = written.read(name, rect).float()
        rows = scales[rect.row // high :][: -(-rect.rows // high)]
        spread = rows.repeat_interleave(high, 0)[: rect.rows].repeat_interleave(wide, 1)[:, : rect.cols]
        allowed = torch.maximum(expected.abs() * _RELATIVE, spread * _OF_SCALE)
        if not bool(((part - expected).abs() <= allowed).all()):
            raise differs(
                name, f"rows {rect.row} to {rect.row + rect.rows - 1} do not match the source's values in fp8"
            )
        advance(rect.rows * rect.cols)


def compare_int4(name: str, shape: Shape, source: Reading, written: Reading, advance: Advance) -> None:
    """Raises SlimxError unless every value of the tensor `name` in INT4 is within rounding of its value in `source`:
    half a scale, plus bf16's rounding of element, quotient and value. `advance`: receives the number of compared
    bytes."""
    for rect in row_blocks(shape, 4):
        expected = source.read(name, rect).float()
        part = written.read(name, rect).float()
        groups = expected.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        allowed = _OF_INT4_SCALE * scale + _LEAST_BF16
        if not bool(((part.unflatten(1, (-1, GROUP)) - groups).abs() <= allowed).all()):
            raise differs(
                name, f"rows {rect.row} to {rect.row + rect.rows - 1} do not match the source's values in INT4"
            )
        advance(rect.rows * rect.cols)


def differs(name: str, difference: str) -> SlimxError:
    """Builds the error for an output in which the tensor `name` differs from the source. `difference`: clause that says
    what differs."""
    return SlimxError(
        f"tensor {name} of the output differs from the source: {difference}; do not use the output, and report "
        "this error to the developers of slimx with the config.json of the source",
        code="convert.values",
        about=name,
    )
