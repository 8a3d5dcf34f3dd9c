"""Operations: methods of a rank's roles that the driver calls on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Residency = Literal["weights", "training"]


@dataclass(frozen=True, slots=True)
class Operation:
    """Conditions under which an operation runs."""

    phase: str | None
    """The phase to which its peak memory counts."""
    needs: Residency | None
    """Parts of the model that must be on the device; "training": also gradients and optimizer state."""


def operation[F: Callable[..., object]](
    phase: str | None = None, *, needs: Residency | None = None
) -> Callable[[F], F]:
    """Marks a method as an operation with these conditions (`Operation`)."""

    def mark(method: F) -> F:
        method.__dict__["operation"] = Operation(phase, needs)
        return method

    return mark
