"""Block-fp8 checkpoints (DeepSeek-V3's): e4m3 codes, and beside each tensor `_scale_inv` with one scale per block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slimx.errors import SlimxError
from slimx.models.files.index import read_object

if TYPE_CHECKING:
    import torch  # at run time where it computes: a plan of a run takes the names from here, without torch

SCALE_SUFFIX = "_scale_inv"
"""Suffix of a quantised tensor's name for its scales, in Hugging Face's block-fp8 checkpoints and in SGLang."""
Block = tuple[int, int]


class Dequantise(Protocol):
    """A function like `dequantise`."""

    def __call__(
        self, codes: torch.Tensor, scales: torch.Tensor, block: Block, row: int, col: int, /
    ) -> torch.Tensor: ...


def block_of(directory: Path) -> Block:
    """Rows and columns of a block, from `directory`/config.json. Raises SlimxError if it does not say."""
    file = directory / "config.json"
    try:
        found = read_object(file)["quantization_config"]["weight_block_size"]
        high, wide = (int(size) for size in found)
        if min(high, wide) < 1:
            raise ValueError(f"{found} is no size")
    except (ValueError, KeyError, TypeError) as error:
        raise SlimxError(
            f"{file}: tensors are in fp8, but quantization_config.weight_block_size does not say in which blocks "
            f"({error!r}); restore it from the checkpoint's source",
            code="checkpoint.block_size",
            about=str(file),
        ) from error
    return high, wide


def scales_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Shape of the scales of a matrix [rows, cols]; blocks at its edges may be cut."""
    rows, cols = shape
    return -(-rows // block[0]), -(-cols // block[1])


def dequantise(codes: torch.Tensor, scales: torch.Tensor, block: Block, row: int, col: int) -> torch.Tensor:
    """Multiply `codes` [rows, cols] e4m3, which begin at (row, col) of their tensor, with `scales` of the whole tensor:
    the product in fp32, rounded to bf16. The same bits as `dequantise` in tests/reshard_reference.py."""
    import torch

    (rows, cols), (high, wide) = codes.shape, block
    first, last = row // high, -(-(row + rows) // high)
    left, right = col // wide, -(-(col + cols) // wide)
    own = scales[first:last, left:right].float().contiguous()
    out = torch.empty(rows, cols, dtype=torch.bfloat16)
    at = 0
    for number in range(first, last):
        stop = min((number + 1) * high - row, rows)
        values, scale = _decode(codes[at:stop]), own[number - first]
        if col % wide == 0 and cols % wide == 0:
            values.view(stop - at, -1, wide).mul_(scale[:, None])
        else:
            values.mul_(scale.repeat_interleave(wide)[col - left * wide :][:cols])
        out[at:stop] = values
        at = stop
    return out


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """Values of e4m3 codes in fp32, as `codes.float()`, which takes three times as long on the CPU (torch 2.13).

    Sign, exponent and mantissa in the places of bf16 are the value over 2^120, subnormal ones too; all ones are NaN.
    """
    import torch

    signed = codes.view(torch.int8)
    out = ((signed.to(torch.int16) << 4) & -0x7810).view(torch.bfloat16).float().mul_(2.0**120)
    magnitude = signed & 0x7F
    if magnitude.max() == 0x7F:
        out[magnitude == 0x7F] = torch.nan
    return out
