"""The arithmetic of trainer and engines, as `numerics.mode` names it: stock kernels, or those of an extra.

A mode is a class derived from `NumericsMode`, and an entry point of the group `slimx.numerics`. Methods import what
they need: drivers and the actors of engines do without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from slimx import entry_points

if TYPE_CHECKING:
    import torch

    from slimx.config.schema import Config

GROUP = "slimx.numerics"


class Head(Protocol):
    """The arithmetic of an output layer whose vocabulary tensor-parallel ranks share."""

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits [T, V / TP] of hidden [T, h] and weight [V / TP, h]."""
        ...

    def logprobs(self, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        """Log-probs [T] of labels [T] from scaled fp32 logits [T, V / TP] of the ranks of `group` (None: one rank)."""
        ...


@dataclass(frozen=True, slots=True)
class NumericsMode:
    """Stock kernels on both sides: the mode fast."""

    OPTION: ClassVar[str | None] = None
    """The option of a server's command line, with one argument, by which the server computes in this mode."""
    replaces_layers: ClassVar[bool] = False
    """True if the mode brings the layers of trainers, in the place of plain torch's, and the operations of engines:
    both multiply by merged weights, and compute a row alike in any batch."""

    @classmethod
    def configured(cls, config: Config) -> Self:
        """Returns the mode of a run."""
        return cls()

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the mode of a server from the argument of `OPTION`. Raises ValueError."""
        return cls()

    def contract(self, dtype: str, device: str = "cpu") -> dict[str, int | str] | None:
        """Returns what both sides attest about their arithmetic, and must have in common; None: nothing."""
        return None

    # Trainer

    def exchange_layers(self, block: Any, transformer: Any, gpt: dict[str, Any]) -> dict[str, Any]:
        """Exchanges the modules in a decoder's spec (TransformerBlockSubmodules); returns the arguments of GPTModel
        instead of `gpt`."""
        return gpt

    def prepare_weights(self, weights: Any, config: Config) -> None:
        """Called with a trainer's `Weights` before they are loaded."""

    def head(self) -> Head | None:
        """Returns the arithmetic of the output layer; None: torch's, with sums over ranks."""
        return None

    # Engines

    def server_arguments(self, device: str) -> dict[str, Any]:
        """Returns SGLang's arguments for a server on `device`."""
        # Without the radix cache, as in SGLang's deterministic mode with this attention.
        return {"attention_backend": "torch_native", "disable_radix_cache": True} if device == "cpu" else {}

    def command_line(self) -> list[str]:
        """Returns the options of `slimx.engines.server.launch`."""
        return []

    def open_choices(self) -> None:
        """Has SGLang's arguments accept those of the mode: called in each process of a server."""

    def register(self, registry: Any, kinds: Any) -> None:
        """Registers operations with SGLang's HookRegistry (`kinds`: its HookType)."""

    def in_force(self, registry: Any, model: torch.nn.Module) -> dict[str, bool]:
        """Returns for each operation whether the server computes with it."""
        return {}


def mode_of(config: Config) -> NumericsMode:
    """Returns the mode of a run."""
    return entry_points.load(GROUP, config.numerics.mode).configured(config)


def server_mode(argv: Sequence[str]) -> NumericsMode:
    """Returns the mode that the command line of `slimx.engines.server.launch` has. Children of a server have the same
    `sys.argv`."""
    return entry_points.by_option(GROUP, argv) or NumericsMode()
