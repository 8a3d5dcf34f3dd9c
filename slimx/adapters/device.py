"""Changes to megatron-core and SGLang that a kind of device needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimx import entry_points

GROUP = "slimx.devices"
"""Entry points: classes of `Device` by "cpu" and "cuda"."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that SGLang lacks on a device."""

    name: str
    reason: str
    open: Callable[[], bool]
    """True while it is missing; after `close` it is not."""
    close: Callable[[], None]


class Device:
    """A kind of device. Each method that a kind does not define changes nothing."""

    def prepare_megatron(self, *, deep_ep: bool) -> list[str]:
        """Prepare a trainer's process for the import of megatron-core; return names of the changes. `deep_ep`: for a
        flex dispatcher."""
        return []

    def change_megatron(self) -> list[str]:
        """Change megatron-core before a model is built; return names of the changes."""
        return []

    def prepare_sglang(self) -> None:
        """Prepare a server's process for the first import of SGLang."""

    def open_choices(self) -> None:
        """Have SGLang's arguments accept what works on this device."""

    def register(self, registry: Any, kinds: Any, *, experts: bool) -> None:
        """Change SGLang in a scheduler's process, by its HookRegistry (`kinds`: its HookType). `experts`: SGLang
        computes them itself."""

    def attest(self) -> dict[str, bool] | None:
        """Return the names of changes to SGLang without hooks, and whether each is in force; None: there are none."""
        return None


def device_named(name: str) -> Device:
    """Return the kind of device, "cpu" or "cuda"."""
    return entry_points.load(GROUP, name)()
