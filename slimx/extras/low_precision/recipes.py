"""Blocks in which a trainer rounds the operands of its matrix products (`trainer.fp8`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Blocks of the matrices whose products a trainer computes in fp8: e4m3 everywhere, as Transformer Engine's recipe
    of the same name."""

    name: str
    rule: str
    vector: tuple[int, int]
    """Block of inputs and of gradients of outputs: runs along the dimension that a product sums over."""
    weight: tuple[int, int]
    """Block of weights; one that is no square runs along the summed dimension too."""
    scale_bytes: int
    """Bytes of a scale."""

    @property
    def width(self) -> int:
        """Elements of a run."""
        return self.vector[1]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("blockwise", "te", vector=(1, 128), weight=(128, 128), scale_bytes=4),
        Recipe("mxfp8", "mxfp8", vector=(1, 32), weight=(1, 32), scale_bytes=1),
    )
}
"""By the name in `trainer.fp8`."""
