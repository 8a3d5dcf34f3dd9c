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
"""Environment variables, in lower or upper case, that set a proxy for HTTP clients. Parts of a run always connect to
each other directly."""
RENDEZVOUS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
)
"""Environment variables in which launchers such as torchrun set a process's rank and world size. That process's
children must not inherit them."""
LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that HTTP clients look up in no_proxy."""
_PACKAGES = str(Path(__file__).parents[2])


def python_argv(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs `module` with this Python interpreter, without the working directory on the
    module search path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a process of a run: `inherited` without the variables that would change how it
    connects to the run's other processes."""
    return {name: value for name, value in inherited.items() if not _misleading(name)}


def clean_environment(environment: MutableMapping[str, str]) -> None:
    """Removes from `environment`, the environment of this process, the variables that `child_environment` drops."""
    for name in list(environment):
        if _misleading(name):
            del environment[name]


def _misleading(name: str) -> bool:
    # PYTHONINSPECT makes Python open an interactive prompt instead of exiting.
    return name.lower() in PROXIES or name in RENDEZVOUS or name.startswith("TORCHELASTIC_") or name == "PYTHONINSPECT"


def bypass_proxies(environment: MutableMapping[str, str], hosts: Iterable[str] = ()) -> None:
    """Makes third-party HTTP clients that read `environment` connect to this machine and to `hosts` without a proxy.
    Both no_proxy and NO_PROXY are set to the union of their hosts."""
    hosts_set = []
    for name in ("no_proxy", "NO_PROXY"):
        for host in environment.get(name, "").split(","):
            if host.strip():
                hosts_set.append(host.strip())
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*hosts_set, *LOCAL, *hosts]))


def search_working_directory() -> None:
    """Moves the working directory to the end of the module search path (`sys.path`), after the directory that contains
    slimx."""
    directory = os.getcwd()
    rest = [path for path in sys.path if path not in ("", directory)]
    for path in (_PACKAGES, directory):
        if path not in rest:
            rest.append(path)
    sys.path[:] = rest
