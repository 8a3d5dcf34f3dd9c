"""Rendezvous of processes of torch.distributed: a TCPStore that listens at one address.

torch's own server listens on every interface, and asks nobody who it is: whoever reaches it reads, writes and deletes
what the processes tell each other.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from slimx.runtime.ports import family


def meet(host: str, port: int, *, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """The store of `size` processes, for each of them; rank 0 serves it. Returns when all have come."""
    if rank:
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    with socket.socket(family(host)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        # The socket is the store's from now on.
        return dist.TCPStore(host, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())
