"""Access to the Ray of a run on one machine: Ray's own settings, for ray 2.60.

GCS, raylet and every worker listen on all interfaces, which cannot be changed, and ask for a token. The rest of Ray
asks nobody, and is kept on the loopback interface or switched off here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError
from slimx.runtime.private import private_directory, private_token

ADDRESS = "127.0.0.2"
"""Address of the node. Ray's agents listen at it; Ray would replace 127.0.0.1 by an address that others reach."""
SYSTEM_CONFIG = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
"""Settings of Ray for a cluster. Without the first each node's agent would offer its counters to everybody; slimx keeps
its own. Without the second the GCS would keep 3 KiB of each of the last 100,000 calls, which nobody asks for."""
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


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
                code="ray.token_file",
                about=str(file),
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
