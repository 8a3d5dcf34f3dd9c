"""Ports on which a run listens, found on its processes and read from the table in docs/operations.md."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Iterator

import psutil

from tests.integration.conftest import ROOT
from tests.integration.runs import TrainProcess

TITLE = "## Ports and keys"
ADDRESSES = {"all": "all", "local": "loopback", "loopback": "loopback"}
"""Kind of address that each word of the table means in a run on one machine."""
PATIENCE_S = 300
Port = tuple[str, str]
"""Process and kind of address."""


def documented() -> set[Port]:
    """The rows of the table."""
    section = (ROOT / "docs/operations.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(process, ADDRESSES[address]) for process, _, address, _ in rows[2:] if "`" not in address}


def opened(run: TrainProcess, expected: set[Port]) -> set[Port]:
    """TCP sockets on which processes of `run` listen, looked for again while one of `expected` is missing: a process
    that ends meanwhile hides others."""
    found: set[Port] = set()
    deadline = time.monotonic() + PATIENCE_S
    while not expected <= found and time.monotonic() < deadline:
        for root in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # sandboxed programs come and go
                for process in (root, *root.children(recursive=True)):  # the router clears its environment
                    found |= set(_listens(process))
    return found


def _listens(process: psutil.Process) -> Iterator[Port]:
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            loopback = ipaddress.ip_address(connection.laddr.ip).is_loopback
            yield _kind(process, loopback), "loopback" if loopback else "all"


def _kind(process: psutil.Process, loopback: bool) -> str:
    """The table's name of a process; a Ray worker's is that of its actor where the port is not Ray's."""
    line = " ".join(process.cmdline())
    if line.startswith("ray::"):
        if not loopback:
            return "Ray's workers and agents"
        actors = {"Agent": "Ray's agents", "TrainerWorker": "trainer", "Engine": "engine actor"}
    else:
        actors = {
            "slimx.cli": "driver",
            "ray/gcs/gcs_server": "gcs_server, raylet",
            "raylet/raylet": "gcs_server, raylet",
            "sglang::router": "router",
            "slimx.engines.server.router_launch": "router",
            "sglang::scheduler": "engine's scheduler",
            "slimx.engines.server.launch": "engine",
        }
    return next((kind for part, kind in actors.items() if part in line), line)
