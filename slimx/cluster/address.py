"""Looks whether something listens at the address of a Ray cluster: Ray itself would try for minutes, deaf to Ctrl-C."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from slimx.errors import SlimxError

CONNECT_S = 2.0


def check_reachable(ray_address: str | None) -> None:
    """Raise SlimxError if nothing listens at `cluster.ray_address`, host:port or ray://host:port; other values, such as
    "auto", are Ray's to find."""
    if ray_address is None or ":" not in ray_address:
        return
    try:
        where = urlsplit(ray_address if "://" in ray_address else f"//{ray_address}")
        socket.create_connection((where.hostname or "", where.port or 0), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise SlimxError(
            f"cluster.ray_address: nothing answers at {ray_address} ({error}); start Ray there, or give "
            "another address; null starts Ray on this machine",
            code="cluster.unreachable",
            about="cluster.ray_address",
        ) from error
