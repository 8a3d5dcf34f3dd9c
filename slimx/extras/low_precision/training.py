"""The roundings of a trainer: products in fp8 (`trainer.fp8`), and routed experts rounded to INT4 (`trainer.qat`).

Imports torch and megatron-core in methods only.
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
    """Matrix products of the linear layers in fp8 (`trainer.fp8`). On GPUs Transformer Engine's own layers compute so,
    elsewhere those of `slimx.extras.low_precision.megatron`."""

    TOKENS: ClassVar[int] = 128
    """Blocks along tokens are whole, and the ranks of sequence parallelism exchange codes in the place of bf16
    (Transformer Engine's `Float8BlockQuantizer.is_quantizable`)."""
    VARIABLES: ClassVar[dict[str, str]] = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    """Transformer Engine reads it on import: scales of 128-wide blocks are fp32, as publications write them, and not
    powers of two."""

    recipe: Recipe

    def fields(self) -> dict[str, Any]:
        """Gradients are e4m3 too: blocks are small enough that e5m2's range is not needed. Attention and output layer
        stay bf16."""
        return {"fp8": "e4m3", "fp8_recipe": self.recipe.name}

    def reasons(self, device: str, *, engine: bool) -> tuple[str, ...]:
        if device != "cuda":
            return (f"fp8 {self.recipe.name}: rounded as a publication rounds, products in fp32 (there is no CUDA)",)
        if not engine:
            raise SlimxError(
                f"trainer.fp8={self.recipe.name} needs the package transformer_engine, which is not here; install it "
                "or leave trainer.fp8 out",
                code="trainer.not_installed",
                about="trainer.fp8",
            )
        return (f"fp8 {self.recipe.name}: Transformer Engine's recipe",)

    def exchange_layers(self, block: Any) -> None:
        from slimx.extras.low_precision import megatron

        megatron.install(block, self.recipe)

    def release(self, chunks: Iterable[Any]) -> None:
        """Empties the copies that Transformer Engine 2.20.2 keeps of weights: megatron-core has them written anew in
        the first micro-batch of every pass, and while engines generate on the GPU they would cost memory."""
        for chunk in chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def kept_bytes(self, elements: int) -> int:
        """Codes and scales of the weights' rows, and once more of their columns."""
        scales = -(-elements // prod(self.recipe.weight))
        return 2 * (elements + scales * self.recipe.scale_bytes)


class Int4Experts(Rounding):
    """The model computes with routed experts that hold the values of INT4 (docs/numerics.md) whenever parameters were
    written. The optimizer goes on from the unrounded ones, and the gradients that it gets are those of the rounded
    ones, as they are."""

    def prepare_weights(self, weights: Any) -> None:
        from slimx.extras.low_precision.int4 import rounded_parts
        from slimx.extras.low_precision.int4_kernel import round_

        names = [part.name for part in rounded_parts(weights.spec.table, weights.parts)]

        def round_experts() -> None:
            for name in names:
                round_(weights.parameters[name])

        weights.derived.insert(0, round_experts)
        weights.changed()


BLOCKWISE, MXFP8 = (Fp8(recipe) for recipe in RECIPES.values())
INT4_EXPERTS = Int4Experts()
