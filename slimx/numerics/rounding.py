"""Rounding of the operands of a trainer's matrix products to low precision (`trainer.fp8`, `trainer.qat`): no rounding,
or a rounding that an extra defines.

A rounding is an instance of a subclass of `Rounding`, and an entry point of the group `slimx.roundings` whose name is
the value of the configuration key. Its methods import torch only when they are called, because the driver runs without
torch."""

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
    """Base class of the roundings that layers may apply to their operands. This class itself rounds nothing: weights
    and activations are multiplied as they are."""

    TOKENS: ClassVar[int] = 1
    """Required divisor of the number of tokens on each rank; micro-batches are padded to a multiple of it."""
    VARIABLES: ClassVar[Mapping[str, str]] = {}
    """Environment variables, with their values, that this rounding requires in trainer processes that use a GPU; set
    before torch is imported."""

    def fields(self) -> Json:
        """Returns the fields of megatron-core's TransformerConfig that enable this rounding in Transformer Engine's
        layers."""
        return {}

    def reasons(self, device: str, *, engine: bool) -> tuple[str, ...]:
        """Returns messages for the log about how layers on `device` round their operands. `engine`: True if Transformer
        Engine computes the layers. Raises SlimxError if these layers cannot round their operands."""
        return ()

    def exchange_layers(self, block: object) -> None:
        """Replaces plain torch layers in the spec of a decoder (TransformerBlockSubmodules) with layers that round
        their operands."""

    # The type of `weights` is Any, because its class is defined in slimx.trainer, which depends on this package.
    def prepare_weights(self, weights: Any) -> None:
        """Prepares the `Weights` of a trainer for this rounding, after the optimizer has copied the weights to its fp32
        main weights."""

    def release(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Frees the rounded weights that the modules `chunks` cache from one micro-batch to the next."""

    def kept_bytes(self, elements: int) -> int:
        """Returns the size on a GPU of the rounded weights that modules cache between micro-batches, in bytes.
        `elements`: number of weights."""
        return 0


def rounding_of(trainer: Trainer) -> Rounding:
    """Returns the rounding that the configuration section `trainer` selects."""
    name = trainer.fp8 or trainer.qat
    return Rounding() if name is None else entry_points.load(GROUP, name)
