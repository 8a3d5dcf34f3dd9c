"""Ports, addresses and identity of this machine, and the rendezvous of torch.distributed.

Trainer ranks import this module before Ray and torch, and loading a configuration imports it too, so it imports neither
at the top."""

from __future__ import annotations

import ipaddress
import random
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from slimx.errors import SlimxError

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.0/8"
"""CIDR of the network that a run uses if all of its processes are on one machine."""
LISTENING = range(20000, 22000)
"""Ports that `free_port` selects from, which no other part of a run uses: Ray's workers use ports up to 19999, SGLang
22000 to 29999, and Linux 32768 and above for outgoing connections. A port that is free in one of those ranges is often
taken by another process before a server that needs 20 s to start listens on it."""
TRIES = 500


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a random port of `LISTENING` that is free at `host`. It is reserved for this process as long as the
    process runs: this function never returns it to another process in the meantime."""
    port, claim = claimed_port(host)
    claim.detach()  # stays open until the process exits
    return port


def claimed_port(host: str) -> tuple[int, socket.socket]:
    """Returns a free port, as `free_port` does, with a socket that reserves it; closing the socket releases the
    port."""
    for port in random.SystemRandom().sample(LISTENING, TRIES):
        claim = _claim(port) if _is_free(host, port) else None
        if claim is not None:
            return port, claim
    raise SlimxError(
        f"none of {TRIES} random ports from {LISTENING.start} to {LISTENING.stop - 1} on {host} is free; stop programs "
        "that use ports in this range",
        code="ports.none",
        about=host,
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket(family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _claim(port: int) -> socket.socket | None:
    """Reserves `port` among all processes of this network namespace and returns the socket that holds the reservation;
    None if another process has reserved it.

    The reservation is the name of an abstract Unix socket. It belongs to the same namespace as the port, and the kernel
    releases it however the process ends.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0slimx-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def local_address(network: str | None) -> str:
    """Returns this machine's address in `network`, a CIDR; if `network` is None, the address by which Ray identifies
    this machine. Raises SlimxError if the machine has no address in the network."""
    if network is None:
        import ray

        return ray.util.get_node_ip_address()
    import psutil  # slow to import, and loading a configuration imports this module

    subnet = ipaddress.ip_network(network, strict=False)
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(entry.address.partition("%")[0]) in subnet:
                return entry.address
    raise SlimxError(
        f"machine {socket.gethostname()} has no address in cluster.trusted_network={network}; set "
        "cluster.trusted_network to a network to which every machine of the run belongs",
        code="cluster.network",
        about=network,
    )


def address(host: str, port: int) -> str:
    """Returns "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    """Returns the address family of the numeric address `host`: IPv6 if it contains colons, otherwise IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Returns True if the numeric address `host` is a loopback address, reachable from this machine only."""
    return ipaddress.ip_address(host).is_loopback


def is_local(host: str) -> bool:
    """Returns True if `host`, a name or address, belongs to this machine, that is, if a socket can be bound to it."""
    try:
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for kind, *_, socket_address in resolved:
        with socket.socket(kind) as probe:
            try:
                probe.bind(socket_address)
            except OSError:
                continue
            return True
    return False


def meet(host: str, port: int, *, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Connects the `size` processes of a torch.distributed group to one key-value store, which rank 0 serves at `host`
    and `port`, and returns the store when all have connected.

    torch by default serves the store on all network interfaces without authentication, where any client could read,
    write and delete the processes' keys; here it listens at `host` only."""
    import torch.distributed as dist

    if rank:
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    with socket.socket(family(host)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        # The store takes ownership of the socket.
        return dist.TCPStore(host, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def machine() -> str:
    """Returns an identifier of this machine's boot and process id namespace. Two processes with the same identifier see
    the same process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
