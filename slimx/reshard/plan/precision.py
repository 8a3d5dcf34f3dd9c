"""In which dtypes weights travel: the trainer's, the engine's, and block quantisation in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slimx.errors import SlimxError
from slimx.models.files import block_fp8, int4

ModelDtype = Literal["float32", "bfloat16"]
Rule = Literal["ieee", "triton", "te", "ue8m0", "mxfp8", "int4"]

ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}

_NARROW, _NARROW_BLOCK = ("mxfp8", "int4"), (1, 32)
"""Rules with one form of blocks alone, and that form."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Codes with one scale per block: fp8 e4m3, or INT4 two in a byte (docs/numerics.md defines the rules)."""

    rule: Rule
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block in elements."""

    def __post_init__(self) -> None:
        if (self.rule in _NARROW) != (self.block == _NARROW_BLOCK):
            raise SlimxError(
                f"rule {self.rule} with blocks of {self.block}: mxfp8 and int4 have 1 x 32 blocks, no other rule has",
                code="plan.rule",
                about=self.rule,
            )

    @property
    def code_dtype(self) -> str:
        """The dtype of an element of codes."""
        return "uint8" if self.rule == "int4" else "float8_e4m3fn"

    @property
    def per_code(self) -> int:
        """Columns of a matrix that one element of codes holds."""
        return 2 if self.rule == "int4" else 1

    @property
    def scale_dtype(self) -> str:
        """E8M0 exponents for MXFP8, bf16 scales for INT4, fp32 scales for the others."""
        return {"mxfp8": "uint8", "int4": "bfloat16"}.get(self.rule, "float32")

    @property
    def suffixes(self) -> tuple[str, str]:
        """Suffixes of a tensor's name for its codes and for its scales."""
        return (int4.CODES, int4.SCALES) if self.rule == "int4" else ("", block_fp8.SCALE_SUFFIX)

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the codes and of the scales of a tensor [..., rows, cols]."""
        (*stack, rows, cols), (high, wide) = shape, self.block
        return (*stack, rows, cols // self.per_code), (*stack, -(-rows // high), -(-cols // wide))

    @classmethod
    def by(cls, rule: Rule) -> Quantisation:
        """The quantisation that publishes by `rule`, in the blocks that engines take."""
        return cls(rule, _NARROW_BLOCK) if rule in _NARROW else cls(rule)


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtype of the trainer's weights, dtype of the engine's, and how those that the family quantises are quantised."""

    trainer: ModelDtype
    engine: ModelDtype
    quantisation: Quantisation | None = None
