"""The program that `Sandbox.check` runs in the sandbox: it tries what the sandbox must prevent, and prints the results.

slimx is not installed in the sandbox, so this file imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

NAMESPACES = ("user", "pid", "net", "mnt", "ipc", "uts")
CLONE_NEWUSER = 0x10000000
AF_VSOCK = 40
VISIBLE = {"bin", "code", "dev", "lib", "lib64", "proc", "tmp", "usr"}


def source() -> str:
    """Returns the text of this file, which the sandbox runs."""
    return Path(__file__).read_text()


def fails(action: Callable[..., object], *arguments: object) -> bool:
    try:
        action(*arguments)
    except (OSError, MemoryError):
        return True
    return False


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write("x")


def processes(limit: int) -> int:
    """Returns the number of processes that can be started, up to `limit`."""
    started: list[int] = []
    release, hold = os.pipe()
    try:
        while len(started) < limit:
            child = os.fork()
            if child == 0:
                os.close(hold)
                os.read(release, 1)  # returns when the parent closes its end
                os._exit(0)
            started.append(child)
    except OSError:
        pass
    os.close(hold)
    for child in started:
        os.waitpid(child, 0)
    return len(started)


def main() -> None:
    outside = json.load(sys.stdin)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared = {name for name, link in outside["namespaces"].items() if os.readlink(f"/proc/self/ns/{name}") == link}
    libc = ctypes.CDLL(None)
    promises = {
        "the code is not root": os.getuid() != 0 and os.geteuid() != 0,
        "the code has no capabilities": int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0,
        "the code cannot gain privileges": status["NoNewPrivs"].strip() == "1",
        "users and host name are isolated": not {"user", "uts"} & shared,
        "other processes are out of sight and reach": not {"pid", "ipc"} & shared,
        "there is no network": "net" not in shared,
        "files outside cannot be written": all(fails(write, path) for path in ("/x", "/usr/x", "/dev/x", "/code/x")),
        "files outside cannot be read": set(os.listdir("/")) <= VISIBLE,
        "the number of processes is limited": processes(outside["processes"]) < outside["processes"],
        "memory is limited": fails(bytearray, outside["memory"]),
        "memory cannot outlive its process": fails(os.memfd_create, "x") and libc.shmget(0, 4096, 0o1600) == -1,
        "the code cannot create namespaces": libc.unshare(CLONE_NEWUSER) == -1,
        "only local and Internet sockets are allowed": fails(socket.socket, AF_VSOCK),
    }
    print(json.dumps(promises))


if __name__ == "__main__":
    main()
