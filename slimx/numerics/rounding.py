"""The rounding of a trainer's matrix products (`trainer.fp8`, `trainer.qat`): none, or that of an extra.

A rounding is an object of a class derived from `Rounding`, and an entry point of the group `slimx.roundings` named by
the value of its key. Methods import heavy packages lazily: drivers run without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slimx import entry_points
from slimx.json_types import Json

if TYPE_CHECKING:
    import torch

    from slimx.config.sections.trainer import Trainer

GROUP = "slimx.roundings"


class Rounding:
    """No rounding: products of weights and activations as they are."""

    TOKENS: ClassVar[int] = 1
    """Divisor of the number of tokens on each rank."""
    VARIABLES: ClassVar[Mapping[str, str]] = {}
    """Environment variables of a trainer's process on a GPU, set before torch is imported."""

    def fields(self) -> Json:
        """Returns fields of megatron-core's TransformerConfig for rounding in Transformer Engine's layers."""
        return {}

    def reasons(self, device: str, *, engine: bool) -> tuple[str, ...]:
        """Describes how layers on `device` round; `engine`: they are Transformer Engine's. Raises SlimxError if they
        cannot round."""
        return ()

    def exchange_layers(self, block: object) -> None:
        """Replaces plain torch layers in a decoder's spec (TransformerBlockSubmodules)."""

    # `weights` is Any because a room above this one defines its class.
    def prepare_weights(self, weights: Any) -> None:
        """Prepares a trainer's `Weights` after the optimizer has copied them to fp32."""

    def release(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Frees the caches of weights that the modules `chunks` keep between micro-batches."""

    def kept_bytes(self, elements: int) -> int:
        """Returns the bytes of these caches on a GPU for `elements` weights."""
        return 0


def rounding_of(trainer: Trainer) -> Rounding:
    """Returns the rounding of a run."""
    name = trainer.fp8 or trainer.qat
    return Rounding() if name is None else entry_points.load(GROUP, name)
