"""A trainer's process without Ray and without other ranks, begun as `slimx.trainer.worker` begins one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slimx.runtime.ports import free_port
from slimx.trainer.process import install_adapters, prepare_process

if TYPE_CHECKING:
    from slimx.trainer.parallel import ParallelState


@contextmanager
def alone(kind: str, *, threads: int, exact: bool = False) -> Iterator[ParallelState]:
    """The only rank, on a device of `kind`: "cuda" (NCCL) or "cpu" (gloo)."""
    prepare_process(kind, shares_layers=False, local=True)
    install_adapters(plain=exact)
    import torch

    from slimx.layout.ranks import Sizes
    from slimx.trainer.parallel import ParallelState

    torch.set_num_threads(threads)
    parallel = ParallelState(
        Sizes(),
        rank=0,
        init_method=f"tcp://127.0.0.1:{free_port()}",
        device=torch.device(kind),
        deadline_s=120,
        seed=1,
    )
    yield parallel
    parallel.destroy()
