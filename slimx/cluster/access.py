"""Access to Ray, for ray 2.60: whether a cluster's address can be reached, and the settings of one on this machine.

GCS, raylet and every worker listen on all interfaces, which cannot be changed, and ask for a token. The rest of Ray
asks nobody, and is kept on the loopback interface or switched off here.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimx.errors import SlimxError
from slimx.runtime.private import private_directory, private_token

ADDRESS = "127.0.0.2"
"""Address of the node. Ray's agents listen at it; Ray would replace 127.0.0.1 by an address that others reach."""
SYSTEM_CONFIG = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
"""Settings of Ray for a cluster. Without the first each node's agent would offer its counters to everybody; slimx keeps
its own. Without the second the GCS would keep 3 KiB of each of the last 100,000 calls, which nobody asks for."""
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
CONNECT_S = 2.0


def local_options() -> dict[str, Any]:
    """Arguments of `ray.init` for a Ray on this machine. Sets Ray's variables, which its processes inherit.

    Raises SlimxError where RAY_AUTH_MODE switches the token off, or a file cannot be written."""
    check_token()
    if TOKEN not in os.environ:
        # Ray would write one that everybody can read.
        file = Path(os.environ.get(TOKEN_FILE) or Path.home() / ".ray" / "auth_token")
        try:
            private_token(file)
        except OSError as error:
            raise SlimxError(
                f"Ray's token cannot be kept in {file} ({error.strerror}); set {TOKEN_FILE} to a file that you can "
                "write",
            ) from error
    # Ray opens its directory to all users.
    return {"_node_ip_address": ADDRESS, "_temp_dir": str(private_directory() / "ray")}


def check_token() -> None:
    """Raise SlimxError where RAY_AUTH_MODE switches the token off."""
    # Ray's default for a new cluster; set after Ray's import, the variable would be heard by its processes alone.
    if os.environ.get(MODE, "token").lower() != "token":
        raise SlimxError(
            f"{MODE} is {os.environ[MODE]}: whoever reaches this machine could run programs through Ray; unset it",
            code="ray.no_token",
            about=MODE,
        )


def check_reachable(ray_address: str | None) -> None:
    """Raise SlimxError if nothing listens at `cluster.ray_address`, host:port or ray://host:port; other values, such as
    "auto", are Ray's to find. Ray itself would try for minutes, deaf to Ctrl-C."""
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
