"""SGLang's ranks meet at one address of one machine, where torch would listen on every interface.

Written for torch 2.14 (`torch.distributed.rendezvous`), through which sglang 0.5.23 makes its first process group. The
store keeps the groups' addresses: who can write to it decides whom the ranks hear, and what gloo brings is unpickled.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from slimx.runtime.meeting import meet

CREATE = "torch.distributed.rendezvous._create_c10d_store"


def at_one_address(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: Any, **__: Any) -> Any:
    """Replaces torch's `_create_c10d_store`: the store listens at the address of `hostname` alone."""
    return meet(hostname, port, rank=rank, size=world_size, timeout=timeout)
