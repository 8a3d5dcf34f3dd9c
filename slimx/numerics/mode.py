"""Numerics modes, which `numerics.mode` selects: trainer and engines compute with their stock kernels, or with the
arithmetic that an extra defines.

A mode is a subclass of `NumericsMode` and an entry point of the group `slimx.numerics`. Its methods import torch only
when they are called, because the driver and the actors of engines run without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from slimx import entry_points
from slimx.json_types import Json

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from slimx.config.schema import Config

GROUP = "slimx.numerics"


class Head(Protocol):
    """Arithmetic of an output layer whose vocabulary is split over the tensor-parallel ranks."""

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes the logits [T, V / TP] from `hidden` [T, h] and `weight` [V / TP, h], this rank's part of the
        layer's weight."""

    def logprobs(self, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Computes the log-probs [T] of `labels` [T] from this rank's logits, fp32 [T, V / TP], which are already
        divided by the temperature. `group`: ranks among which the vocabulary is split; None for one rank."""


@dataclass(frozen=True, slots=True)
class NumericsMode:
    """The mode `fast`, in which trainer and engines use their stock kernels; base class of all modes."""

    OPTION: ClassVar[str | None] = None
    """Command-line option of a server that selects this mode; the option takes one argument. None if no option is
    needed."""
    replaces_layers: ClassVar[bool] = False
    """True if the mode replaces the plain torch layers of trainers and the operations of engines. With such a mode,
    trainers and engines compute with LoRA adapters merged into the weights, and results for a sequence do not depend on
    the other sequences in the batch."""

    @classmethod
    def configured(cls, config: Config) -> Self:
        """Returns this mode with the settings in `config`."""
        return cls()

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns this mode with the settings in `argument`, the value of the option `OPTION` on a server's command
        line. Raises ValueError if the value is malformed."""
        return cls()

    def contract(self, dtype: str, device: str = "cpu") -> dict[str, int | str] | None:
        """Returns the versions and settings that determine the arithmetic in `dtype` on `device` and therefore must be
        equal in trainer and engines; None if this mode imposes no such requirement."""
        return None

    # Trainer

    def exchange_layers(self, block: object, transformer: object, gpt: Json) -> Json:
        """Replaces modules in `block`, the spec of a decoder (TransformerBlockSubmodules), for the TransformerConfig
        `transformer`. Returns the keyword arguments with which to build GPTModel: those in `gpt`, with the changes that
        this mode requires."""
        return gpt

    # The type of `weights` is Any, because its class is defined in slimx.trainer, which depends on this package.
    def prepare_weights(self, weights: Any, config: Config) -> None:
        """Prepares the `Weights` of a trainer for this mode, before they are loaded."""

    def head(self) -> Head | None:
        """Returns the arithmetic of the output layer; None if torch's own operators are used, with sums over ranks."""
        return None

    # Engines

    def server_arguments(self, device: str) -> Json:
        """Returns the SGLang arguments that this mode requires for a server on `device`."""
        # The radix cache is disabled, as in SGLang's deterministic mode with this attention backend.
        return {"attention_backend": "torch_native", "disable_radix_cache": True} if device == "cpu" else {}

    def command_line(self) -> list[str]:
        """Returns the options of `slimx.engines.server.launch` that select this mode."""
        return []

    def open_choices(self) -> None:
        """Makes SGLang accept this mode's values for its command-line arguments. Called in each process of a server."""

    def register(self, registry: object, kinds: object) -> None:
        """Registers this mode's operations with `registry`, SGLang's HookRegistry. `kinds`: SGLang's HookType."""

    def in_force(self, registry: object, model: torch.nn.Module) -> dict[str, bool]:
        """Returns {name of an operation that this mode replaces in SGLang: True if the server uses this mode's
        implementation}."""
        return {}


def mode_of(config: Config) -> NumericsMode:
    """Returns the numerics mode that the configuration of a run selects."""
    return entry_points.load(GROUP, config.numerics.mode).configured(config)


def server_mode(argv: Sequence[str]) -> NumericsMode:
    """Returns the mode that the command line of `slimx.engines.server.launch` selects. `argv`: sys.argv, which is the
    same in a server's child processes."""
    return entry_points.by_option(GROUP, argv) or NumericsMode()
