"""Implements the two kinds of rounding in a trainer: matrix products in fp8 (`trainer.fp8`), and routed experts rounded
to INT4 (`trainer.qat`).

Only methods import torch and megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from slimx.errors import SlimxError
from slimx.extras.low_precision.recipes import RECIPES, Recipe
from slimx.numerics.rounding import Rounding


@dataclass(frozen=True, slots=True)
class Fp8(Rounding):
    """Rounding mode in which linear layers compute their matrix products in fp8 (`trainer.fp8`), with Transformer
    Engine's layers on GPUs and with those of `slimx.extras.low_precision.megatron` elsewhere. `recipe`: block sizes."""

    TOKENS: ClassVar[int] = 128
    """Required divisor of the number of tokens on each rank, so that all fp8 blocks are complete. Sequence-parallel
    ranks then exchange fp8 codes instead of bf16 values (Transformer Engine's
    `Float8BlockQuantizer.is_quantizable`)."""
    VARIABLES: ClassVar[dict[str, str]] = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    """Environment variables that Transformer Engine reads when it is imported. They allow any fp32 value as the scale
    of a 128-wide block, as in published weights, instead of only powers of two."""

    recipe: Recipe

    def fields(self) -> dict[str, Any]:
        """Returns the fp8 fields of megatron-core's TransformerConfig. Gradients also use e4m3, because blocks are so
        small that they do not need e5m2's range. Attention and output layer stay in bf16."""
        return {"fp8": "e4m3", "fp8_recipe": self.recipe.name}

    def reasons(self, device: str, *, engine: bool) -> tuple[str, ...]:
        if device != "cuda":
            return (
                f"fp8 {self.recipe.name}: operands are rounded as in publications, products are fp32 (no CUDA device)",
            )
        if not engine:
            raise SlimxError(
                f"trainer.fp8={self.recipe.name} needs the package transformer_engine, which is not installed; "
                "install transformer_engine, or remove trainer.fp8",
                code="trainer.not_installed",
                about="trainer.fp8",
            )
        return (f"fp8 {self.recipe.name}: Transformer Engine's recipe",)

    def exchange_layers(self, block: Any) -> None:
        from slimx.extras.low_precision import megatron

        megatron.install(block, self.recipe)

    def release(self, chunks: Iterable[Any]) -> None:
        """Frees the fp8 copies of weights that Transformer Engine 2.20.2 caches in `chunks`. megatron-core rewrites
        them in the first micro-batch of every pass, and the copies would use memory while engines generate on the same
        GPU."""
        for chunk in chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def kept_bytes(self, elements: int) -> int:
        """Returns the size in bytes of the fp8 copies of `elements` weights: codes and scales, stored both rowwise and
        columnwise."""
        scales = -(-elements // prod(self.recipe.weight))
        return 2 * (elements + scales * self.recipe.scale_bytes)


class Int4Experts(Rounding):
    """Rounding of the weights of routed experts to INT4 values (docs/numerics.md), repeated after every write to the
    parameters (`trainer.qat`). The optimizer keeps the unrounded weights and applies to them the gradients with respect
    to the rounded weights (straight-through estimator)."""

    def prepare_weights(self, weights: Any) -> None:
        from slimx.extras.low_precision.int4 import rounded_parts
        from slimx.extras.low_precision.int4_kernel import round_

        names = [part.name for part in rounded_parts(weights.spec.table, weights.parts)]

        def round_experts() -> None:
            for name in names:
                round_(weights.parameters[name])

        weights.derived.insert(0, round_experts)
        weights.changed()


BLOCKWISE = Fp8(RECIPES["blockwise"])
MXFP8 = Fp8(RECIPES["mxfp8"])
INT4_EXPERTS = Int4Experts()
