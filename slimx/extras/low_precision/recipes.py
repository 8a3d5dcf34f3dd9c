"""Blocks for rounding the operands of a trainer's matrix products (`trainer.fp8`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Blocks of the matrices whose products a trainer computes in fp8: e4m3 throughout, as in Transformer Engine's
    recipe of the same name."""

    name: str
    rule: str
    vector: tuple[int, int]
    """Block of inputs and of output gradients: a run along the summed dimension of a product."""
    weight: tuple[int, int]
    """Block of weights; if not square, also along the summed dimension."""
    scale_bytes: int
    """Size of a scale, in bytes."""

    @property
    def width(self) -> int:
        """Number of elements of a run."""
        return self.vector[1]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("blockwise", "te", vector=(1, 128), weight=(128, 128), scale_bytes=4),
        Recipe("mxfp8", "mxfp8", vector=(1, 32), weight=(1, 32), scale_bytes=1),
    )
}
"""Recipes by their names in `trainer.fp8`."""
