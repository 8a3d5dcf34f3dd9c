"""Recipes of `trainer.fp8`: block sizes for rounding the operands of a trainer's matrix products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Block sizes of the operands of fp8 matrix products, as in Transformer Engine's recipe of the same name. All
    operands are e4m3. `rule`: rule that determines scales, a value of `publish.quantize`."""

    name: str
    rule: str
    vector: tuple[int, int]
    """Rows and columns of a quantization block of inputs or output gradients; the block extends along the summed
    dimension."""
    weight: tuple[int, int]
    """Rows and columns of a quantization block of weights. A block that is not square extends along the summed
    dimension, like blocks of inputs."""
    scale_bytes: int
    """Size in bytes of one scale."""

    @property
    def width(self) -> int:
        """Number of elements in a block of inputs, along the summed dimension."""
        return self.vector[1]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("blockwise", "te", vector=(1, 128), weight=(128, 128), scale_bytes=4),
        Recipe("mxfp8", "mxfp8", vector=(1, 32), weight=(1, 32), scale_bytes=1),
    )
}
"""Recipes by name; the names are the values of `trainer.fp8`."""
