"""Changes to megatron-core and SGLang on NVIDIA GPUs."""

from __future__ import annotations

from slimx.adapters.device import Device, HookKinds, HookRegistry


class Gpu(Device):
    """Adaptations for NVIDIA GPUs: the import of DeepEP in trainers, and seeded sampling with few fp64 operations in
    engines."""

    def prepare_megatron(self, *, deep_ep: bool) -> list[str]:
        from slimx.adapters.megatron.imports import prepare_deep_ep

        return prepare_deep_ep(needed=deep_ep)

    def register(self, registry: HookRegistry, kinds: HookKinds, *, experts: bool) -> None:
        from slimx.adapters.sglang import (
            # Only for GPUs: on a CPU the fp32 estimate costs as much as the fp64 logarithms that it avoids.
            seeded_sampling as draws,
        )

        registry.register(draws.DRAW, draws.draw, kinds.REPLACE)
