"""Interface for the changes to megatron-core and SGLang that each device type (CPU, CUDA) needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slimx import entry_points

GROUP = "slimx.devices"
"""Entry point group of the `Device` subclasses, named "cpu" and "cuda"."""


class HookRegistry(Protocol):
    """Interface of SGLang's HookRegistry, reduced to the only method that slimx uses."""

    def register(self, target: str, hook: object, kind: object) -> object:
        """Registers `hook` for the function with dotted name `target`. `kind`, a member of `HookKinds`, determines
        whether the hook replaces or wraps the function or runs before or after it."""


class HookKinds(Protocol):
    """Members of SGLang's HookType enum: a hook replaces its target function, wraps it, or runs before or after it."""

    REPLACE: object
    AROUND: object
    BEFORE: object
    AFTER: object


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in SGLang's support for a device, such as a missing function or a refused argument, and the function with
    which slimx closes it."""

    name: str
    reason: str
    open: Callable[[], bool]
    """Function that returns True until `close` has closed the gap."""
    close: Callable[[], None]


class Device:
    """Adaptations that slimx needs for one device type. Each method does nothing unless a subclass overrides it."""

    def prepare_megatron(self, *, deep_ep: bool) -> list[str]:
        """Makes the changes that a trainer's process needs before it imports megatron-core, and returns their names.
        `deep_ep`: True if the trainer dispatches tokens with DeepEP (`trainer.moe.dispatcher=flex`)."""
        return []

    def change_megatron(self) -> list[str]:
        """Makes the changes to megatron-core that are needed before a model is built, and returns their names."""
        return []

    def prepare_sglang(self) -> None:
        """Prepares a server's process for SGLang; must be called before the first import of SGLang."""

    def open_choices(self) -> None:
        """Makes SGLang's server arguments also accept the values that work on this device only with slimx's changes."""

    def register(self, registry: HookRegistry, kinds: HookKinds, *, experts: bool) -> None:
        """Changes SGLang in a scheduler's process by registering hooks. `kinds`: SGLang's HookType. `experts`: True if
        SGLang's own MoE layers compute the experts, False if a numerics mode replaces those layers."""

    def attest(self) -> dict[str, bool] | None:
        """Returns, for each change to SGLang that is made without a hook, its name and whether it is active; None if
        the device needs no such changes."""
        return None


def device_named(name: str) -> Device:
    """Returns the `Device` for the device type `name`, "cpu" or "cuda"."""
    return entry_points.load(GROUP, name)()
