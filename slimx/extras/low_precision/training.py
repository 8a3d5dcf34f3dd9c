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
    """Matrix products of the linear layers in fp8 (`trainer.fp8`), by Transformer Engine's layers on GPUs and by those
    of `slimx.extras.low_precision.megatron` elsewhere."""

    TOKENS: ClassVar[int] = 128
    """Tokens per block: with complete blocks, ranks of sequence parallelism exchange codes instead of bf16 (Transformer
    Engine's `Float8BlockQuantizer.is_quantizable`)."""
    VARIABLES: ClassVar[dict[str, str]] = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    """Read by Transformer Engine on import: scales of 128-wide blocks are fp32, as in publications, instead of powers
    of two."""

    recipe: Recipe

    def fields(self) -> dict[str, Any]:
        """Returns Megatron's fp8 fields. Gradients are e4m3 too: blocks are small enough to do without e5m2's range.
        Attention and output layer stay bf16."""
        return {"fp8": "e4m3", "fp8_recipe": self.recipe.name}

    def reasons(self, device: str, *, engine: bool) -> tuple[str, ...]:
        if device != "cuda":
            return (f"fp8 {self.recipe.name}: rounded as in a publication, products in fp32 (no CUDA device)",)
        if not engine:
            raise SlimxError(
                f"trainer.fp8={self.recipe.name} needs the package transformer_engine, which is not installed; install "
                "it or leave trainer.fp8 out",
                code="trainer.not_installed",
                about="trainer.fp8",
            )
        return (f"fp8 {self.recipe.name}: Transformer Engine's recipe",)

    def exchange_layers(self, block: Any) -> None:
        from slimx.extras.low_precision import megatron

        megatron.install(block, self.recipe)

    def release(self, chunks: Iterable[Any]) -> None:
        """Clears Transformer Engine 2.20.2's cached copies of weights: megatron-core rewrites them in the first
        micro-batch of every pass, and they would use memory while engines generate on the GPU."""
        for chunk in chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def kept_bytes(self, elements: int) -> int:
        """Returns the bytes of the weights' fp8 codes and scales, stored rowwise and columnwise."""
        scales = -(-elements // prod(self.recipe.weight))
        return 2 * (elements + scales * self.recipe.scale_bytes)


class Int4Experts(Rounding):
    """Routed experts with INT4 values (docs/numerics.md), rounded after every write of parameters. The optimizer keeps
    the unrounded weights and gets the gradients of the rounded ones unchanged."""

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
