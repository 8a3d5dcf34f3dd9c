"""In which dtypes weights travel: the trainer's, the engine's, and block quantisation in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimx.errors import SlimxError
from slimx.models.files.block_fp8 import SCALE_SUFFIX as SCALE_SUFFIX

ModelDtype = Literal["float32", "bfloat16"]
Rule = Literal["ieee", "triton", "te", "ue8m0", "mxfp8"]

ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """fp8 e4m3 codes with one scale per block (reshard.md's rules; docs/numerics.md defines them)."""

    rule: Rule
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block in elements."""

    def __post_init__(self) -> None:
        if (self.rule == "mxfp8") != (self.block == (1, 32)):
            raise SlimxError(
                f"rule {self.rule} with blocks of {self.block}: mxfp8 has 1 x 32 blocks, no other rule has",
                code="plan.rule",
                about=self.rule,
            )

    @property
    def scale_dtype(self) -> str:
        """E8M0 exponents for MXFP8, fp32 scales for the others."""
        return "uint8" if self.rule == "mxfp8" else "float32"


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtype of the trainer's weights, dtype of the engine's, and how those that the family quantises are quantised."""

    trainer: ModelDtype
    engine: ModelDtype
    quantisation: Quantisation | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """Blocks of the matrices whose products a trainer computes in fp8 (`trainer.fp8`): e4m3 everywhere, as Transformer
    Engine's recipe of the same name."""

    rule: Rule
    vector: tuple[int, int]
    """Block of inputs and of gradients of outputs: runs along the dimension that a product sums over."""
    weight: tuple[int, int]
    """Block of weights; one that is no square runs along the summed dimension too."""

    @property
    def width(self) -> int:
        """Elements of a run."""
        return self.vector[1]


RECIPES: dict[str, Recipe] = {
    "blockwise": Recipe("te", vector=(1, 128), weight=(128, 128)),
    "mxfp8": Recipe("mxfp8", vector=(1, 32), weight=(1, 32)),
}
"""By the name in `trainer.fp8`."""
TOKENS = 128
"""Tokens of each rank are a multiple of it with `trainer.fp8`: blocks along them are whole, and the ranks of sequence
parallelism exchange codes in the place of bf16 (Transformer Engine's `Float8BlockQuantizer.is_quantizable`)."""
