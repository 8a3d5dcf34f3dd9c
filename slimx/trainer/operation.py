"""Operations: methods of a rank's roles that the driver calls on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Residency = Literal["weights", "training"]


@dataclass(frozen=True, slots=True)
class Operation:
    """Conditions of an operation."""

    phase: str | None
    """The phase to which its peak memory counts."""
    needs: Residency | None
    """Parts of the model that must be on the device; "training": gradients and optimizer state, too."""


def operation[F: Callable[..., Any]](phase: str | None = None, *, needs: Residency | None = None) -> Callable[[F], F]:
    """Mark a method as an operation with these conditions (`Operation`)."""

    def mark(method: F) -> F:
        method.operation = Operation(phase, needs)
        return method

    return mark
