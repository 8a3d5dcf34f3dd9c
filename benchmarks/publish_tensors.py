"""The method with which benchmarks/publish_direct.py compares slimx: one gather and one broadcast per tensor.

This is a trainer without a plan: an expert's matrix is gathered from the ranks that hold the experts, and every tensor
is broadcast from rank 0 to all engines, by gloo. One process of each engine host takes part, and nothing is copied into
a model or verified, which all favors this method.
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
    """A TCPStore of rank 0, and groups of processes that rendezvous there."""

    def __init__(self, host: str):
        self.where = host, free_port(host)
        self.store = dist.TCPStore(*self.where, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def group_at(where: tuple[str, int], name: str, rank: int, size: int, address: str) -> dist.ProcessGroup:
    """Returns the group `name` of `size` processes, with this one as `rank`, over the network interface with the
    address `address`."""
    store = dist.PrefixStore(name, dist.TCPStore(*where, is_master=False, timeout=TIMEOUT, wait_for_workers=False))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def is_expert(name: str) -> bool:
    return ".experts." in name


def sizes_of(parameters: Mapping[str, torch.Tensor], holders: int) -> list[int]:
    """Returns the bytes of each broadcast tensor, in order: an expert's matrix once for each of `holders` ranks."""
    return [parameters[name].nbytes for name in sorted(parameters) for _ in range(holders if is_expert(name) else 1)]


def send(
    parameters: Mapping[str, torch.Tensor], rank: int, holders: dist.ProcessGroup, engines: dist.ProcessGroup | None
) -> float:
    """Runs the part of a rank with experts; the first one broadcasts to `engines`. Returns the seconds."""
    began = time.perf_counter()
    for name in sorted(parameters):
        data = parameters[name].contiguous().view(-1).view(torch.uint8)
        tensors = [data]
        if is_expert(name):
            tensors = [torch.empty_like(data) for _ in range(holders.size())]
            holders.allgather([tensors], [data]).wait()
        for tensor in tensors if rank == 0 else ():
            engines.broadcast([tensor]).wait()
    return time.perf_counter() - began


def take(sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Runs an engine host's part."""
    data = torch.empty(max(sizes), dtype=torch.uint8)
    for size in sizes:
        group.broadcast([data[:size]]).wait()
