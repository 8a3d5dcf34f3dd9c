"""The way that benchmarks/publish_direct.py compares with: tensor by tensor, one gather and one broadcast.

What a trainer does without a plan: an expert's matrix is gathered from the ranks that hold the experts, and every
tensor is broadcast from rank 0 to all engines, by gloo. One process of each engine host takes part, and nothing is put
into its place or proven, all of which favours it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from slimx.runtime.ports import free_port

TIMEOUT = timedelta(seconds=240)


class Meeting:
    """A TCPStore of rank 0, and groups of processes that meet there."""

    def __init__(self, host: str):
        self.where = host, free_port(host)
        self.store = dist.TCPStore(*self.where, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def group_at(where: tuple[str, int], name: str, rank: int, size: int, own_host: str) -> dist.ProcessGroup:
    """The group `name` of `size` processes, this one as `rank`, over the interface that has the address `own_host`."""
    store = dist.PrefixStore(name, dist.TCPStore(*where, is_master=False, timeout=TIMEOUT, wait_for_workers=False))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def is_expert(name: str) -> bool:
    return ".experts." in name


def sizes_of(held: Mapping[str, torch.Tensor], holders: int) -> list[int]:
    """Bytes of each tensor that is broadcast, in their order: an expert's matrix once for each of `holders` ranks."""
    return [held[name].nbytes for name in sorted(held) for _ in range(holders if is_expert(name) else 1)]


def send(
    held: Mapping[str, torch.Tensor], rank: int, holders: dist.ProcessGroup, engines: dist.ProcessGroup | None
) -> float:
    """One of the ranks that hold the experts, of which the first broadcasts to `engines`; seconds that it took."""
    began = time.perf_counter()
    for name in sorted(held):
        own = held[name].contiguous().view(-1).view(torch.uint8)
        tensors = [own]
        if is_expert(name):
            tensors = [torch.empty_like(own) for _ in range(holders.size())]
            holders.allgather([tensors], [own]).wait()
        for tensor in tensors if rank == 0 else ():
            engines.broadcast([tensor]).wait()
    return time.perf_counter() - began


def take(sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """An engine host's part."""
    data = torch.empty(max(sizes), dtype=torch.uint8)
    for size in sizes:
        group.broadcast([data[:size]]).wait()
