"""Operations: methods of a rank's roles that the driver calls on all ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Residency = Literal["weights", "training"]


@dataclass(frozen=True, slots=True)
class Operation:
    """Declaration of a trainer operation: the conditions under which it runs."""

    phase: str | None
    """Phase in which the operation's peak memory is counted; None to count it in the phase in which the operation is
    called."""
    needs: Residency | None
    """Parts of the model that must be on the device: "weights", or "training" to include gradients and optimizer state;
    None for no part."""


def operation[F: Callable[..., object]](
    phase: str | None = None, *, needs: Residency | None = None
) -> Callable[[F], F]:
    """Returns a decorator that marks a method as an operation with the given conditions (see `Operation`)."""

    def mark(method: F) -> F:
        method.__dict__["operation"] = Operation(phase, needs)
        return method

    return mark
