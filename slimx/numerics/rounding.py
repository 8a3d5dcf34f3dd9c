"""The rounding of what a trainer multiplies (`trainer.fp8`, `trainer.qat`): none, or that of an extra.

A rounding is an object of a class derived from `Rounding`, and an entry point of the group `slimx.roundings` with the
value of its key as its name. Methods import what they need: drivers do without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slimx import entry_points

if TYPE_CHECKING:
    from slimx.config.sections.trainer import Trainer

GROUP = "slimx.roundings"


class Rounding:
    """Products of weights and activations as they are."""

    TOKENS: ClassVar[int] = 1
    """Divisor of the number of tokens of each rank."""
    VARIABLES: ClassVar[Mapping[str, str]] = {}
    """Variables of a trainer's process on a GPU, set before torch is imported."""

    def fields(self) -> dict[str, Any]:
        """Returns fields of megatron-core's TransformerConfig by which Transformer Engine's layers round."""
        return {}

    def reasons(self, device: str, *, engine: bool) -> tuple[str, ...]:
        """Returns how layers on `device` round, in words; `engine`: they are Transformer Engine's. Raises SlimxError
        where they cannot."""
        return ()

    def exchange_layers(self, block: Any) -> None:
        """Exchanges plain torch's layers in a decoder's spec (TransformerBlockSubmodules)."""

    def prepare_weights(self, weights: Any) -> None:
        """Called with a trainer's `Weights` when the optimizer has copied them in fp32."""

    def release(self, chunks: Iterable[Any]) -> None:
        """Gives back what the modules `chunks` keep of weights from one micro-batch to the next."""

    def kept_bytes(self, elements: int) -> int:
        """Returns bytes of what a GPU's modules keep so of `elements` weights."""
        return 0


def rounding_of(trainer: Trainer) -> Rounding:
    """Returns the rounding of a run."""
    name = trainer.fp8 or trainer.qat
    return Rounding() if name is None else entry_points.load(GROUP, name)
