"""Changes to megatron-core and SGLang that a type of device needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slimx import entry_points

GROUP = "slimx.devices"
"""Entry points: classes of `Device` by "cpu" and "cuda"."""


class HookRegistry(Protocol):
    """SGLang's HookRegistry."""

    def register(self, target: str, hook: object, kind: object) -> object:
        """Registers `hook` for the function `target`."""


class HookKinds(Protocol):
    """SGLang's HookType."""

    REPLACE: object
    AROUND: object
    BEFORE: object
    AFTER: object


@dataclass(frozen=True, slots=True)
class Gap:
    """A function that SGLang lacks on a device."""

    name: str
    reason: str
    open: Callable[[], bool]
    """True until `close` has been called."""
    close: Callable[[], None]


class Device:
    """A type of device. A method that it does not override changes nothing."""

    def prepare_megatron(self, *, deep_ep: bool) -> list[str]:
        """Prepares a trainer's process for the import of megatron-core; returns names of the changes. `deep_ep`: for a
        flex dispatcher."""
        return []

    def change_megatron(self) -> list[str]:
        """Changes megatron-core before a model is built; returns names of the changes."""
        return []

    def prepare_sglang(self) -> None:
        """Prepares a server's process for the first import of SGLang."""

    def open_choices(self) -> None:
        """Makes SGLang's arguments accept the choices that work on this device."""

    def register(self, registry: HookRegistry, kinds: HookKinds, *, experts: bool) -> None:
        """Changes SGLang in a scheduler's process, through its HookRegistry (`kinds`: its HookType). `experts`: SGLang
        computes them itself."""

    def attest(self) -> dict[str, bool] | None:
        """Returns the names of changes to SGLang without hooks, and whether each is active; None if there are none."""
        return None


def device_named(name: str) -> Device:
    """Returns the device type "cpu" or "cuda"."""
    return entry_points.load(GROUP, name)()
