"""A server that computes with the adapters of its policies: each has a slot, which its publications write.

Written for sglang 0.5.23, in force where the server was started with `--publish-adapters`. SGLang serves adapters that
requests name and that it loads itself. Here every slot is pinned and zero from the start, so that nothing evicts what
was proven. A request to a server of one policy is computed with its adapters; where there are several, requests name
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.errors import SlimxError
from slimx.extras.lora.adapters.slots import AdapterSlot

START = "sglang.srt.lora.lora_manager.LoRAManager.init_state"
PREPARE = "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch"


class Unpinned(TorchFunctionMode):
    """Memory that would be pinned for copies to a GPU stays as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return args[0] if function is torch.Tensor.pin_memory else function(*args, **given)


def unpinned() -> AbstractContextManager[Any]:
    """A context in which SGLang's layers with adapters work without a GPU: they pin memory, which torch does with one
    only."""
    return nullcontext() if torch.cuda.is_available() else Unpinned()


def register(registry: Any, kinds: Any, policies: Mapping[str, float]) -> None:
    """Register the hooks of a server of `policies` with SGLang's `HookRegistry`; `kinds`: its HookType."""
    registry.register(START, partial(with_slots, policies), kinds.AROUND)
    registry.register(PREPARE, as_the_policy, kinds.AROUND)


def with_slots(
    policies: Mapping[str, float], original: Callable[..., None], manager: Any, *args: Any, **given: Any
) -> None:
    """Around `LoRAManager.init_state`: then load zeros as each policy's adapters, and have the receiver write there."""
    from sglang.srt.lora.lora_registry import LoRARef

    with unpinned():
        original(manager, *args, **given)
        for name, alpha in policies.items():
            config = {
                "peft_type": "LORA",
                "r": manager.max_lora_rank,
                "lora_alpha": alpha,
                "target_modules": sorted(manager.target_modules),
            }
            # What has no tensors is zero.
            result = manager.load_lora_adapter_from_tensors(LoRARef(name, name, name, pinned=True), {}, config)
            if not result.success:
                raise SlimxError(
                    f"SGLang does not take adapters of rank {manager.max_lora_rank}: {result.error_message}",
                )
        manager.fetch_new_loras({None, *policies})
    slots = {name: manager.memory_pool.get_buffer_id(name) for name in policies}
    served = {name: AdapterSlot(manager, slot) for name, slot in slots.items()}
    receiver_of(manager.base_model).adapters = served


def as_the_policy(original: Callable[..., None], manager: Any, batch: Any) -> None:
    """Around `LoRAManager.prepare_lora_batch`: requests of the batch that name no adapters are for the first policy."""
    first = next(iter(manager.loras))
    batch.lora_ids = [first if name is None else name for name in batch.lora_ids]
    with unpinned():
        original(manager, batch)


def attest(manager: Any) -> dict[str, Any] | None:
    """The rank of the adapters that this rank computes with, and their scale by policy; None for a server to which none
    are published."""
    policies = {} if manager is None else receiver_of(manager.base_model).adapters
    if not policies:
        return None
    return {
        "rank": max(manager.loras[name].config.r for name in policies),
        "scales": {name: manager.loras[name].scaling for name in policies},
    }
