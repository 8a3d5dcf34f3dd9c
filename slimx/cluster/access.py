"""Access to Ray, for ray 2.60: reachability of a cluster's address, and the settings of a cluster on this machine.

GCS, raylet and every worker listen on all interfaces, which cannot be changed, and require a token. Ray's other
services have no authentication; they are bound to the loopback interface or switched off here.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.runtime.user_files import private_directory, private_token

ADDRESS = "127.0.0.2"
"""Address of the node, on which Ray's agents listen; Ray would replace 127.0.0.1 by an externally reachable address."""
SYSTEM_CONFIG = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
"""System configuration of a Ray cluster. Without the first, each node's agent exposes its counters to everyone; slimx
collects its own. Without the second, the GCS keeps 3 KiB for each of the last 100,000 calls, which nothing reads."""
MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
CONNECT_S = 2.0
"""Timeout of a connection attempt, in seconds."""


def local_options() -> Json:
    """Returns arguments of `ray.init` for a Ray cluster on this machine. Sets Ray's environment variables, which its
    processes inherit.

    Raises SlimxError if RAY_AUTH_MODE switches the token off or a file cannot be written."""
    check_token()
    if TOKEN not in os.environ:
        # Ray would write a file that is readable by everyone.
        file = Path(os.environ.get(TOKEN_FILE) or Path.home() / ".ray" / "auth_token")
        try:
            private_token(file)
        except OSError as error:
            raise SlimxError(
                f"Ray's token cannot be saved in {file} ({error.strerror}); set {TOKEN_FILE} to a writable file",
            ) from error
    # Ray makes its directory accessible to all users.
    return {"_node_ip_address": ADDRESS, "_temp_dir": str(private_directory() / "ray")}


def check_token() -> None:
    """Raises SlimxError if RAY_AUTH_MODE switches the token off."""
    # "token" is Ray's default for a new cluster; if set after Ray's import, the variable affects only its children.
    if os.environ.get(MODE, "token").lower() != "token":
        raise SlimxError(
            f"{MODE} is {os.environ[MODE]}: anyone who reaches this machine could run programs through Ray; unset it",
            code="ray.no_token",
            about=MODE,
        )


def check_reachable(ray_address: str | None) -> None:
    """Raises SlimxError if nothing listens at `cluster.ray_address`, host:port or ray://host:port.

    Other values, such as "auto", are left to Ray. Ray itself would retry for minutes and ignore Ctrl-C."""
    if ray_address is None or ":" not in ray_address:
        return
    try:
        url = urlsplit(ray_address if "://" in ray_address else f"//{ray_address}")
        socket.create_connection((url.hostname or "", url.port or 0), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise SlimxError(
            f"cluster.ray_address: nothing answers at {ray_address} ({error}); start Ray there, or give "
            "another address; null starts Ray on this machine",
            code="cluster.unreachable",
            about="cluster.ray_address",
        ) from error
