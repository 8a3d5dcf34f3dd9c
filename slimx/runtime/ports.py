"""This machine among others: ports for servers that will listen some seconds from now, addresses, rendezvous, identity.

Trainer ranks import it before Ray and torch, which a configuration does without."""

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
"""The network of a run on one machine."""
LISTENING = range(20000, 22000)
"""Ports that no other part of a run draws from: Ray's workers take up to 19999, SGLang its own from 22000 to 29999, and
Linux those of outgoing connections from 32768 up. One of theirs would often be taken again before a server that needs
20 s to start listens on it."""
TRIES = 500


def free_port(host: str = "127.0.0.1") -> int:
    """A random port of `LISTENING` on which nobody listens now, and which no other process that asks here is given
    while this process lives."""
    port, claim = claimed_port(host)
    claim.detach()  # stays open as long as this process
    return port


def claimed_port(host: str) -> tuple[int, socket.socket]:
    """A port as `free_port` gives it, and the claim on it, which ends when it is closed."""
    for port in random.SystemRandom().sample(LISTENING, TRIES):
        if _is_free(host, port) and (claim := _claim(port)) is not None:
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
    """Claim `port` among all processes of this network namespace; None if another one has it.

    The claim is a name of an abstract Unix socket: it belongs to the same namespace as the port, and the kernel gives
    it back when the process ends, however it ends.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0slimx-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def own_address(network: str | None) -> str:
    """This machine's address in `network`, a CIDR; None: the one by which Ray knows it. Raises SlimxError if it has
    none."""
    if network is None:
        import ray

        return ray.util.get_node_ip_address()
    import psutil  # slow, and every configuration imports this module

    wanted = ipaddress.ip_network(network, strict=False)
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
        and ipaddress.ip_address(each.address.partition("%")[0]) in wanted
    ]
    if not found:
        raise SlimxError(
            f"{socket.gethostname()} has no address in {network} (cluster.trusted_network); name a network that every "
            "machine of the run is in",
            code="cluster.network",
            about=network,
        )
    return found[0]


def address(host: str, port: int) -> str:
    """host:port, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    """The address family of an address: IPv6 has colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches the address `host`."""
    return ipaddress.ip_address(host).is_loopback


def is_own(host: str) -> bool:
    """Returns True if `host`, a name or address, is this machine's: only to these can a socket be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for kind, *_, where in found:
        with socket.socket(kind) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def meet(host: str, port: int, *, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """The store of `size` processes of torch.distributed, for each of them; rank 0 serves it, at one address. Returns
    when all have come.

    torch's own server listens on every interface, and asks nobody who it is: whoever reaches it reads, writes and
    deletes what the processes tell each other."""
    import torch.distributed as dist

    if rank:
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    with socket.socket(family(host)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        # The socket is the store's from now on.
        return dist.TCPStore(host, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def machine() -> str:
    """An identifier that is equal in two processes that can see each other by process id: one boot of one kernel, one
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
