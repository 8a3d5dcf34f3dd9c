"""A server of one policy that computes with its adapters: they lie in one slot, which publications write.

Written for sglang 0.5.23, in force where the server was started with `--publish-adapters`. SGLang serves adapters that
requests name and that it loads itself. Here the slot is pinned and zero from the start, so that nothing evicts what was
proven, and every batch uses it: whoever asks such a server asks the policy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slimx.adapters.sglang.weights.adapters import ServedAdapters
from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.errors import SlimxError

OPTION = "--publish-adapters"
"""Option of `slimx.engines.server.launch` with the adapters' alpha; children of a server have the same `sys.argv`."""
START = "sglang.srt.lora.lora_manager.LoRAManager.init_state"
PREPARE = "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch"
UID = "slimx"
"""SGLang's name for the policy's adapters."""


class Unpinned(TorchFunctionMode):
    """Memory that would be pinned for copies to a GPU stays as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return args[0] if function is torch.Tensor.pin_memory else function(*args, **given)


def unpinned() -> AbstractContextManager[Any]:
    """A context in which SGLang's layers with adapters work without a GPU: they pin memory, which torch does with one
    only."""
    return nullcontext() if torch.cuda.is_available() else Unpinned()


def asked(argv: Sequence[str]) -> float | None:
    """The alpha that the command line of `slimx.engines.server.launch` gives; None: no adapters are published to it."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return float(own[own.index(OPTION) + 1]) if OPTION in own else None


def register(registry: Any, kinds: Any) -> None:
    """Register the hooks with SGLang's `HookRegistry`; `kinds`: its HookType."""
    registry.register(START, with_slot, kinds.AROUND)
    registry.register(PREPARE, as_the_policy, kinds.AROUND)


def with_slot(original: Callable[..., None], manager: Any, *args: Any, **given: Any) -> None:
    """Around `LoRAManager.init_state`: then load zeros as the policy's adapters, and have the receiver write there."""
    from sglang.srt.lora.lora_registry import LoRARef

    with unpinned():
        original(manager, *args, **given)
        config = {
            "peft_type": "LORA",
            "r": manager.max_lora_rank,
            "lora_alpha": asked(sys.argv),
            "target_modules": sorted(manager.target_modules),
        }
        # What has no tensors is zero.
        told = manager.load_lora_adapter_from_tensors(LoRARef(UID, UID, UID, pinned=True), {}, config)
        if not told.success:
            raise SlimxError(
                f"SGLang does not take adapters of rank {manager.max_lora_rank}: {told.error_message}",
                code="plugin.adapters",
                about="trainer.lora",
            )
        manager.fetch_new_loras({None, UID})
    slot = manager.memory_pool.get_buffer_id(UID)
    receiver_of(manager.base_model).adapters = ServedAdapters(manager, slot)


def as_the_policy(original: Callable[..., None], manager: Any, batch: Any) -> None:
    """Around `LoRAManager.prepare_lora_batch`: every request of the batch is for the policy."""
    batch.lora_ids = [UID] * len(batch.lora_ids)
    with unpinned():
        original(manager, batch)


def attest(manager: Any) -> dict[str, Any] | None:
    """The rank, scale and modules of the adapters that this rank computes with; None for a server without any."""
    if manager is None or UID not in manager.loras:
        return None
    loaded = manager.loras[UID]
    return {"rank": loaded.config.r, "scale": loaded.scaling, "modules": sorted(manager.target_modules)}
