"""The arithmetic of trainer and engines, as selected by `numerics.mode`: stock kernels, or those of an extra.

A mode is a class derived from `NumericsMode`, and an entry point of the group `slimx.numerics`. Methods import heavy
packages lazily: drivers and the actors of engines run without torch.
"""

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
    """The arithmetic of an output layer whose vocabulary is split over tensor-parallel ranks."""

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes logits [T, V / TP] of hidden [T, h] and weight [V / TP, h]."""
        ...

    def logprobs(self, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Computes log-probs [T] of labels [T] from scaled fp32 logits [T, V / TP] of the ranks of `group` (None: one
        rank)."""
        ...


@dataclass(frozen=True, slots=True)
class NumericsMode:
    """The mode fast: stock kernels on both sides."""

    OPTION: ClassVar[str | None] = None
    """The command-line option of a server, with one argument, that selects this mode."""
    replaces_layers: ClassVar[bool] = False
    """True if the mode replaces the plain torch layers of trainers and the operations of engines: both multiply by
    merged weights, and a row's result does not depend on its batch."""

    @classmethod
    def configured(cls, config: Config) -> Self:
        """Returns the mode of a run."""
        return cls()

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the mode of a server from the argument of `OPTION`. Raises ValueError."""
        return cls()

    def contract(self, dtype: str, device: str = "cpu") -> dict[str, int | str] | None:
        """Returns the attestation of the arithmetic, which both sides must share; None if there is none."""
        return None

    # Trainer

    def exchange_layers(self, block: object, transformer: object, gpt: Json) -> Json:
        """Replaces modules in a decoder's spec (TransformerBlockSubmodules) for a TransformerConfig; returns the
        arguments of GPTModel that replace `gpt`."""
        return gpt

    # `weights` is Any because a room above this one defines its class.
    def prepare_weights(self, weights: Any, config: Config) -> None:
        """Prepares a trainer's `Weights` before they are loaded."""

    def head(self) -> Head | None:
        """Returns the arithmetic of the output layer; None: torch's, with sums over ranks."""
        return None

    # Engines

    def server_arguments(self, device: str) -> Json:
        """Returns SGLang's arguments for a server on `device`."""
        # Without the radix cache, as in SGLang's deterministic mode with this attention.
        return {"attention_backend": "torch_native", "disable_radix_cache": True} if device == "cpu" else {}

    def command_line(self) -> list[str]:
        """Returns the options of `slimx.engines.server.launch`."""
        return []

    def open_choices(self) -> None:
        """Makes SGLang's arguments accept this mode's choices; called in each process of a server."""

    def register(self, registry: object, kinds: object) -> None:
        """Registers operations with SGLang's HookRegistry (`kinds`: its HookType)."""

    def in_force(self, registry: object, model: torch.nn.Module) -> dict[str, bool]:
        """Returns for each operation whether the server uses this mode's version."""
        return {}


def mode_of(config: Config) -> NumericsMode:
    """Returns the mode of a run."""
    return entry_points.load(GROUP, config.numerics.mode).configured(config)


def server_mode(argv: Sequence[str]) -> NumericsMode:
    """Returns the mode selected by the command line of `slimx.engines.server.launch`. Children of a server have the
    same `sys.argv`."""
    return entry_points.by_option(GROUP, argv) or NumericsMode()
