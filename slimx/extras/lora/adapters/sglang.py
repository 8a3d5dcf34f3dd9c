"""Serves the adapters of policies from SGLang's adapter slots: one slot per policy, into which the policy's
publications write.

Written for sglang 0.5.23; active in a server started with `--publish-adapters`. By default SGLang loads the adapters
that requests name. With slimx every slot is filled with zeros when the server starts and is pinned, so that SGLang
never evicts published adapters. In a server with one policy all requests use its adapters; with several policies,
requests name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slimx.adapters.sglang.weights.receiver import Slot, receiver_of
from slimx.errors import SlimxError
from slimx.extras.lora.adapters.slots import AdapterSlot

START = "sglang.srt.lora.lora_manager.LoRAManager.init_state"
PREPARE = "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch"


class Unpinned(TorchFunctionMode):
    """Torch function mode in which torch ignores requests to pin memory for copies to a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return args[0] if function is torch.Tensor.pin_memory else function(*args, **options)


def unpinned() -> AbstractContextManager[Any]:
    """Returns a context in which SGLang's layers with adapters work on a machine without a GPU: these layers pin
    memory, which torch cannot do without a GPU. Has no effect on a machine with a GPU."""
    return nullcontext() if torch.cuda.is_available() else Unpinned()


def register(registry: Any, kinds: Any, policies: Mapping[str, float]) -> None:
    """Registers in SGLang's HookRegistry `registry` the hooks of a server that serves adapters.

    `kinds`: SGLang's HookType. `policies`: name -> alpha."""
    registry.register(START, partial(with_slots, policies), kinds.AROUND)
    registry.register(PREPARE, as_the_policy, kinds.AROUND)


def with_slots(
    policies: Mapping[str, float], original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any
) -> None:
    """Runs SGLang's `LoRAManager.init_state` (`original`), loads zeros as the adapters of each policy in `policies`,
    and registers the policies' slots with the receiver of published weights."""
    from sglang.srt.lora.lora_registry import LoRARef

    with unpinned():
        original(manager, *args, **kwargs)
        for name, alpha in policies.items():
            config = {
                "peft_type": "LORA",
                "r": manager.max_lora_rank,
                "lora_alpha": alpha,
                "target_modules": sorted(manager.target_modules),
            }
            # No tensors are passed, because SGLang uses zeros for missing ones.
            result = manager.load_lora_adapter_from_tensors(LoRARef(name, name, name, pinned=True), {}, config)
            if not result.success:
                raise SlimxError(
                    f"SGLang rejected the adapters of policy {name} (rank {manager.max_lora_rank}): "
                    f"{result.error_message}",
                )
        manager.fetch_new_loras({None, *policies})
    slots: dict[str, Slot] = {}
    for name in policies:
        slots[name] = AdapterSlot(manager, manager.memory_pool.get_buffer_id(name))
    receiver_of(manager.base_model).adapters = slots


def as_the_policy(original: Callable[..., None], manager: Any, batch: Any) -> None:
    """Runs SGLang's `LoRAManager.prepare_lora_batch` after assigning the first policy's adapters to requests that name
    no adapters."""
    first = next(iter(manager.loras))
    batch.lora_ids = [first if name is None else name for name in batch.lora_ids]
    with unpinned():
        original(manager, batch)


def attest(manager: Any) -> dict[str, Any] | None:
    """Returns the properties of this server rank's adapters that clients check, {rank: LoRA rank, scales: {policy:
    alpha / rank}}; None for a server without published adapters."""
    policies = {} if manager is None else receiver_of(manager.base_model).adapters
    if not policies:
        return None
    return {
        "rank": max(manager.loras[name].config.r for name in policies),
        "scales": {name: manager.loras[name].scaling for name in policies},
    }
