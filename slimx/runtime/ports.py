"""Network names of this machine: ports for servers that start to listen later, addresses, rendezvous, machine id.

Trainer ranks import this module before Ray and torch; the configuration needs neither."""

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
"""Network of a run on one machine."""
LISTENING = range(20000, 22000)
"""Ports that no other part of a run draws from: Ray's workers use up to 19999, SGLang 22000 to 29999, and Linux 32768
and up for outgoing connections. Ports of those ranges are often taken before a server that needs 20 s to start listens
on them."""
TRIES = 500


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a random free port of `LISTENING`. No other process that calls this gets the port while this process
    lives."""
    port, claim = claimed_port(host)
    claim.detach()  # stays open as long as this process
    return port


def claimed_port(host: str) -> tuple[int, socket.socket]:
    """Returns a port as `free_port` does and the claim on it, which is released when it is closed."""
    for port in random.SystemRandom().sample(LISTENING, TRIES):
        claim = _claim(port) if _is_free(host, port) else None
        if claim is not None:
            return port, claim
    raise SlimxError(
        f"none of {TRIES} ports from {LISTENING.start} to {LISTENING.stop} on {host} is free; end what listens there",
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
    """Claims `port` among all processes of this network namespace; None if another process has claimed it.

    The claim is the name of an abstract Unix socket: it belongs to the same namespace as the port, and the kernel
    releases it when the process ends, however it ends.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0slimx-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def local_address(network: str | None) -> str:
    """Returns this machine's address in `network`, a CIDR; None: the address by which Ray identifies it. Raises
    SlimxError if it has none."""
    if network is None:
        import ray

        return ray.util.get_node_ip_address()
    import psutil  # slow, and every configuration imports this module

    subnet = ipaddress.ip_network(network, strict=False)
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(entry.address.partition("%")[0]) in subnet:
                return entry.address
    raise SlimxError(
        f"{socket.gethostname()} has no address in {network} (cluster.trusted_network); name a network that every "
        "machine of the run is in",
        code="cluster.network",
        about=network,
    )


def address(host: str, port: int) -> str:
    """Returns host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    """Returns the address family of an address: IPv6 has colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Returns True if the address `host` is reachable from this machine only."""
    return ipaddress.ip_address(host).is_loopback


def is_local(host: str) -> bool:
    """Returns True if `host`, a name or address, belongs to this machine: a socket can be bound to it."""
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
    """Connects `size` processes of torch.distributed to one store, which rank 0 serves on one address; returns it once
    all have joined.

    torch's own server listens on every interface without authentication: any client could read, write and delete the
    processes' keys."""
    import torch.distributed as dist

    if rank:
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    with socket.socket(family(host)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        # The store owns the socket from now on.
        return dist.TCPStore(host, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def machine() -> str:
    """Returns an identifier that two processes share if they see the same process ids: one boot of one kernel, one
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
