"""Changes to megatron-core and SGLang on GPUs."""

from __future__ import annotations

from slimx.adapters.device import Device, HookKinds, HookRegistry


class Gpu(Device):
    """An NVIDIA GPU."""

    def prepare_megatron(self, *, deep_ep: bool) -> list[str]:
        from slimx.adapters.megatron.imports import prepare_deep_ep

        return prepare_deep_ep(needed=deep_ep)

    def register(self, registry: HookRegistry, kinds: HookKinds, *, experts: bool) -> None:
        from slimx.adapters.sglang import (
            seeded_sampling as draws,  # a CPU computes fp64 as fast as the estimate that saves it
        )

        registry.register(draws.DRAW, draws.draw, kinds.REPLACE)
