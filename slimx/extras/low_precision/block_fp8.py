"""The number format block fp8, as in DeepSeek-V3's checkpoints: a tensor of e4m3 codes, and a tensor NAME_scale_inv
with one scale per block of the codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.number_formats import NumberFormat, Quantization, StoredTensors
from slimx.layout.parts import matrix
from slimx.layout.table import Stored
from slimx.models.files.index import read_object

if TYPE_CHECKING:
    import torch  # functions that compute import it, because plans use this module's names without torch

    from slimx.config.schema import Config
    from slimx.layout.ranks import Sizes

SCALE_SUFFIX = "_scale_inv"
"""Suffix that is appended to a quantized tensor's name to form the name of its scales, in Hugging Face's block-fp8
checkpoints and in SGLang."""
CODES = "F8_E4M3"
"""Dtype of fp8 codes, as named in safetensors files."""
SCALES = ("F32", "BF16", "F16")
"""Accepted dtypes of scales, as named in safetensors files; all convert to fp32 without loss."""
Block = tuple[int, int]


def block_of(directory: Path) -> Block:
    """Returns the size (rows, columns) of the quantization blocks of the checkpoint in `directory`. Raises SlimxError
    if its config.json does not define it."""
    file = directory / "config.json"
    return _block(read_object(file), file)


def _block(config: Mapping[str, Any], file: Path) -> Block:
    try:
        size = config["quantization_config"]["weight_block_size"]
        high, wide = (int(length) for length in size)
        if min(high, wide) < 1:
            raise ValueError(f"{size} is not a size")
    except (ValueError, KeyError, TypeError) as error:
        raise SlimxError(
            f"the checkpoint is in fp8, but in {file} quantization_config.weight_block_size is not a list of two "
            f"positive integers ({error!r}); restore config.json from the source of the checkpoint",
            code="checkpoint.block_size",
            about=str(file),
        ) from error
    return high, wide


def scales_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Returns the shape of the scale tensor for a matrix of shape `shape` [rows, cols]. Blocks at the matrix's edges
    may be smaller."""
    rows, cols = shape
    return -(-rows // block[0]), -(-cols // block[1])


def quantization(rule: str, block: Block | None = None) -> Quantization:
    """Returns the quantization to e4m3 codes by `rule`, a value of `publish.quantize`. Scales are fp32, or E8M0
    exponents for rule mxfp8. `block`: rows and columns of a block; None: 128 x 128, or 1 x 32 for mxfp8.

    Raises SlimxError for an unknown rule, or one that does not support this block size.
    """
    narrow = rule == "mxfp8"
    if block is None:
        block = (1, 32) if narrow else (128, 128)
    if rule not in BlockFp8.RULES or narrow != (block == (1, 32)):
        raise SlimxError(
            f"the fp8 rule {rule} does not support blocks of {block[0]} x {block[1]}; use blocks of 1 x 32 with mxfp8, "
            "and blocks of any other size with ieee, triton, te or ue8m0",
            code="plan.rule",
            about=rule,
        )
    if narrow:
        return Quantization(rule, block, "QUANTIZE_MXFP8", "float8_e4m3fn", "uint8", ("", SCALE_SUFFIX))
    return Quantization(rule, block, "QUANTIZE_FP8", "float8_e4m3fn", "float32", ("", SCALE_SUFFIX))


class BlockFp8(NumberFormat):
    """Number format of checkpoints with `quant_method: fp8` in config.json."""

    RULES: ClassVar[tuple[str, ...]] = ("ieee", "triton", "te", "ue8m0", "mxfp8")
    CONVERTED: ClassVar[bool] = True

    def holds(self, files: Any, name: str) -> bool:
        if name not in files.names:
            return False
        view = files.view(name)
        return view.get_dtype() == CODES and len(view.get_shape()) == 2

    def tensors(self, files: Any, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        scales = scales_shape(files.shape(name), self._block(files))
        return {name: (shape, (CODES,)), name + SCALE_SUFFIX: (scales, SCALES)}

    def read(self, files: Any, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        """Returns the bf16 values of rows `rows` and columns `cols` of the tensor stored at `place`, by reading and
        dequantizing all blocks that overlap them."""
        from slimx.extras.low_precision.blocks import dequantize

        block = self._block(files)
        high, wide = block
        top = rows.start // high
        left = cols.start // wide
        codes = files.view(place.name)[top * high : rows.stop, left * wide : cols.stop]
        scales = files.whole(place.name + SCALE_SUFFIX)[top : -(-rows.stop // high), left : -(-cols.stop // wide)]
        values = dequantize(codes, scales.float().contiguous(), block, threads=1)
        return values[rows.start - top * high :, cols.start - left * wide :]

    def _block(self, files: Any) -> Block:
        return _block(files.config, files.path / "config.json")

    def refuse(self, path: Path, unknown: Sequence[str]) -> None:
        scales = [name for name in unknown if name.endswith(SCALE_SUFFIX)]
        if scales:
            raise SlimxError(
                f"{path} is a block-wise fp8 checkpoint ({len(scales)} tensors store block scales, for example "
                f"{scales[0]}), but slimx trains only from bf16 and fp32 checkpoints; convert the checkpoint with "
                "`slimx convert hf-to-megatron`, and train from the output directory",
                code="checkpoint.fp8",
                about=scales[0],
            )

    def nearest(self, config: Config, sizes: Sizes) -> Iterator[tuple[str, Config, Sizes]]:
        from slimx.extras.low_precision.nearest import nearest

        return nearest(config, sizes)

    def quantization(self, rule: str) -> Quantization:
        return quantization(rule)

    def codes_of(self, parameter: str) -> str | None:
        return parameter.removesuffix(SCALE_SUFFIX) if parameter.endswith(SCALE_SUFFIX) else None

    def scales(self, pieces: Iterable[Any], owner: Any) -> Iterator[Any]:
        """Yields, for each of `pieces` (the parts of code tensors that a parameter stores), the part of the scale
        tensor for the same blocks. Rectangles of the yielded parts are in units of blocks."""
        block = tuple(owner.quant_method.quant_config.weight_block_size)
        for piece in pieces:
            if piece.tensor is None:
                raise SlimxError("a parameter stored as fp8 codes contains padding, for which there are no scales")
            rects = tuple(_in_blocks(r, piece, block) for r in piece.rects)
            yield replace(
                piece,
                tensor=f"{piece.tensor}{SCALE_SUFFIX}",
                shape=scales_shape(matrix(piece.shape), block),
                rects=rects,
            )


def _in_blocks(r: Rect, piece: Any, block: Block) -> Rect:
    """Returns `r`, a rectangle of `piece`, in units of blocks. Raises SlimxError if an edge of the rectangle cuts
    through a block."""
    height, width = block
    rows, cols = matrix(piece.shape)
    remainders = [r.row % height, r.local_row % height, r.col % width, r.local_col % width]
    # Only the last block of a tensor may be smaller than the others.
    if r.row + r.rows < rows:
        remainders.append(r.rows % height)
    if r.col + r.cols < cols:
        remainders.append(r.cols % width)
    if any(remainders):
        raise SlimxError(
            f"the shards of {piece.tensor} would cut through its quantization blocks of {height} x {width} elements; "
            "lower rollout.engines.tensor or rollout.engines.expert"
        )
    return Rect(
        r.source,
        r.row // height,
        r.col // width,
        -(-r.rows // height),
        -(-r.cols // width),
        r.local_row // height,
        r.local_col // width,
    )


FORMAT = BlockFp8()
