"""Command line and environment of the Python processes that a run starts.

A process started by `python -m` searches its working directory for modules first: a folder `slimx` or a file `torch.py`
there would replace the package. Therefore every program of slimx starts with `-P`, and where user code is imported the
working directory is the last entry of the search path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Variables, in either case, that configure a proxy of HTTP clients. Parts of a run are always reached directly."""
RENDEZVOUS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
)
"""Variables of launchers such as torchrun with a process's rank and world size, which do not apply to its children."""
LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that clients compare with no_proxy."""
_PACKAGES = str(Path(__file__).parents[2])


def python_argv(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in this environment's Python without the working directory on the search
    path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that is part of a run: `inherited` without those that would change how it
    reaches the other parts."""
    return {name: value for name, value in inherited.items() if not _misleading(name)}


def clean_environment(environment: MutableMapping[str, str]) -> None:
    """Removes from the environment of this process the variables that `child_environment` drops."""
    for name in list(environment):
        if _misleading(name):
            del environment[name]


def _misleading(name: str) -> bool:
    # PYTHONINSPECT would make a process wait at a prompt when it ends.
    return name.lower() in PROXIES or name in RENDEZVOUS or name.startswith("TORCHELASTIC_") or name == "PYTHONINSPECT"


def bypass_proxies(environment: MutableMapping[str, str], hosts: Iterable[str] = ()) -> None:
    """Makes third-party clients that read `environment` reach this machine and `hosts` without a proxy. Both spellings
    of no_proxy get the hosts of either."""
    hosts_set = []
    for name in ("no_proxy", "NO_PROXY"):
        for host in environment.get(name, "").split(","):
            if host.strip():
                hosts_set.append(host.strip())
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*hosts_set, *LOCAL, *hosts]))


def search_working_directory() -> None:
    """Puts the working directory at the end of the search path, after slimx's own packages."""
    directory = os.getcwd()
    rest = [path for path in sys.path if path not in ("", directory)]
    for path in (_PACKAGES, directory):
        if path not in rest:
            rest.append(path)
    sys.path[:] = rest
