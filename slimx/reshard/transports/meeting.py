"""Rendezvous of processes of torch.distributed: a TCPStore that listens at one address.

torch's own server listens on every interface, and asks nobody who it is: whoever reaches it reads, writes and deletes
what the processes tell each other.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from slimx.runtime.ports import family


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that takes connections at `host`, an address of this machine, and nowhere else; port 0: a free one."""
    listener = socket.socket(family(host))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def serve(listener: socket.socket, timeout: timedelta, *, size: int | None = None) -> dist.TCPStore:
    """The store whose clients come to `listener`, which is the store's from now on. `size`: processes that it waits
    for; None: it waits for none."""
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=size is not None,
        master_listen_fd=listener.detach(),
    )


def meet(host: str, port: int, *, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """The store of `size` processes, for each of them; rank 0 serves it. Returns when all have come."""
    if rank == 0:
        return serve(listen(host, port), timeout, size=size)
    return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
