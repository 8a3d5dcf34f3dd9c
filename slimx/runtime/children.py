"""Command line and environment of the Python processes that a run starts.

A process started by `python -m` looks for modules in its working directory first: a folder `slimx` or a file `torch.py`
there would take the package's place. So every program of slimx starts with `-P`, and where code of the user is
imported the working directory comes last in the search path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Variables, in either case, by which HTTP clients find a proxy: no part of a run is reached through one."""
RENDEZVOUS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
)
"""Variables by which launchers such as torchrun tell a process its place among others, which is not its place here."""
LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that clients compare with no_proxy."""
_PACKAGES = str(Path(__file__).parents[2])


def python_argv(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in this environment's Python, without its working directory in the search
    path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that is part of a run: `inherited` without those that would change how it
    reaches the others."""
    return {name: value for name, value in inherited.items() if not _misleading(name)}


def clean_environment(environment: MutableMapping[str, str]) -> None:
    """Remove from `environment`, this process's, what `child_environment` leaves out."""
    for name in [name for name in environment if _misleading(name)]:
        del environment[name]


def _misleading(name: str) -> bool:
    # PYTHONINSPECT would have a process wait at a prompt when it ends.
    return name.lower() in PROXIES or name in RENDEZVOUS or name.startswith("TORCHELASTIC_") or name == "PYTHONINSPECT"


def bypass_proxies(environment: MutableMapping[str, str], hosts: Iterable[str] = ()) -> None:
    """Have clients of other people's, which read `environment`, reach this machine and `hosts` without a proxy. Both
    spellings of no_proxy get what either has."""
    before = [environment.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    named = [host.strip() for value in before for host in value.split(",") if host.strip()]
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*named, *LOCAL, *hosts]))


def search_working_directory() -> None:
    """Have modules of the working directory found after all others, and slimx before a folder of that name there."""
    here = os.getcwd()
    rest = [path for path in sys.path if path not in ("", here)]
    sys.path[:] = [*rest, *(path for path in (_PACKAGES, here) if path not in rest)]
