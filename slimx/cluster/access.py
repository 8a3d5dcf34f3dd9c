"""Access control for Ray 2.60: whether a cluster's address is reachable, and the settings of a cluster that slimx
starts on this machine.

GCS, raylet and every worker listen on all network interfaces, which cannot be changed, and require a token. Ray's other
services have no authentication, so they are bound to the loopback interface or switched off here.
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
"""IP address of a local cluster's node, at which Ray's agents listen. Ray would replace 127.0.0.1 with an externally
reachable address."""
SYSTEM_CONFIG = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
"""System configuration of a local Ray cluster, which turns off two features.

enable_metrics_collection: otherwise each node's agent would expose its counters to everyone; slimx collects metrics
itself. task_events_report_interval_ms: above 0, the GCS would keep 3 KiB of data, which nothing reads, for each of the
last 100,000 calls."""
MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
CONNECT_S = 2.0
"""Seconds within which a connection to the Ray cluster must be established."""


def local_options() -> Json:
    """Returns the arguments for `ray.init` that start a local cluster. If there is no token yet, creates and saves the
    one that the cluster's processes will require.

    Raises SlimxError if RAY_AUTH_MODE disables token authentication or the token cannot be saved."""
    check_token()
    if TOKEN not in os.environ:
        # Ray's own token file would be readable by every user.
        file = Path(os.environ.get(TOKEN_FILE) or Path.home() / ".ray" / "auth_token")
        try:
            private_token(file)
        except OSError as error:
            raise SlimxError(
                f"Ray's token cannot be saved in {file} ({error.strerror}); set {TOKEN_FILE} to the path of "
                "a writable file",
            ) from error
    # Ray makes its directory accessible to all users, so it is put into a private one.
    return {"_node_ip_address": ADDRESS, "_temp_dir": str(private_directory() / "ray")}


def check_token() -> None:
    """Raises SlimxError if the environment variable RAY_AUTH_MODE disables Ray's token authentication."""
    # "token" is the default for a new cluster; if set after `import ray`, the variable affects only child processes.
    if os.environ.get(MODE, "token").lower() != "token":
        raise SlimxError(
            f"{MODE}={os.environ[MODE]} would let anyone who can reach this machine run programs through Ray; unset "
            f"the environment variable {MODE}",
            code="ray.no_token",
            about=MODE,
        )


def check_reachable(ray_address: str | None) -> None:
    """Raises SlimxError if nothing listens at `ray_address`, the value of `cluster.ray_address`: host:port or
    ray://host:port.

    Other values, such as "auto", are not checked. The check precedes Ray's, which would retry for minutes and ignore
    Ctrl-C."""
    if ray_address is None or ":" not in ray_address:
        return
    try:
        url = urlsplit(ray_address if "://" in ray_address else f"//{ray_address}")
        socket.create_connection((url.hostname or "", url.port or 0), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise SlimxError(
            f"cluster.ray_address is {ray_address}, where nothing responds ({error}); start Ray at this address, set "
            "another address, or set cluster.ray_address=null to start Ray on this machine",
            code="cluster.unreachable",
            about="cluster.ray_address",
        ) from error
