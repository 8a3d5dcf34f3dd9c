"""The device "cpu": an entry point of `slimx.devices`."""

from __future__ import annotations

from typing import Any

from slimx.adapters.device import Device


class Cpu(Device):
    """Device of a machine without a GPU; determines when the changes in `adapters/` to torch, megatron-core and SGLang
    are made."""

    def prepare_megatron(self, *, deep_ep: bool) -> list[str]:
        from slimx.extras.cpu.adapters import megatron

        return megatron.install()

    def change_megatron(self) -> list[str]:
        from slimx.extras.cpu.adapters import megatron

        return megatron.install_megatron()

    def prepare_sglang(self) -> None:
        from slimx.extras.cpu.adapters import absent

        absent.install()

    def open_choices(self) -> None:
        from slimx.extras.cpu.adapters import sglang

        sglang.open_choices()

    def register(self, registry: Any, kinds: Any, *, experts: bool) -> None:
        from slimx.extras.cpu.adapters import sglang

        sglang.register_hooks(registry, kinds, experts=experts)
        sglang.close_gaps()

    def attest(self) -> dict[str, bool] | None:
        from slimx.extras.cpu.adapters import sglang

        return sglang.attest()
