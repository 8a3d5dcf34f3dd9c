"""Stands for a program that a zygote runs: hands over its arguments, variables and files, then signals, and ends as the
program does. Part of an executable that imports nothing else, so that it starts in milliseconds."""

from __future__ import annotations

import array
import json
import os
import signal
import socket

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
BYTES = 2**20
"""Bytes of a request, at most."""
LOG = "log"
"""File for the errors of all zygotes of a directory."""
RAY_WORKER = "default_worker.py"
FORKSERVER = "from multiprocessing.forkserver "
"""Beginning of the text of multiprocessing's server of forks."""


def main(directory: str, python: str, arguments: list[str]) -> None:
    """`directory`: of the zygotes' sockets. `python`: the interpreter, for programs that none of them runs."""
    first, *rest = without_flags(arguments) or [""]
    if first != "-m" and not first.endswith(".py") and not (first == "-c" and rest[0].startswith(FORKSERVER)):
        os.execv(python, [python, *arguments])
    role = "rank" if any(word.endswith(RAY_WORKER) for word in arguments) else "driver"
    connection = connected(os.path.join(directory, role))
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _inherited(number)]
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    program = request(connection, arguments, files, parent=os.getppid(), tied=True)
    for number in SIGNALS:
        signal.signal(number, lambda signum, frame: os.kill(program, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number in files:
        os.close(number)
    status = status_from(connection.recv(16))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def without_flags(arguments: list[str]) -> list[str]:
    """Returns the arguments of an interpreter without flags that a fork has no use for."""
    begin = 0
    while begin < len(arguments) and arguments[begin].startswith(("-P", "-u", "-B", "-W")):
        begin += 1
    return arguments[begin:]


def connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BYTES)
    try:
        connection.connect(path)
    except ConnectionRefusedError as refused:
        with open(os.path.join(os.path.dirname(path), LOG)) as log:
            raise RuntimeError(f"the zygote of {path} has ended: {log.read()}") from refused
    return connection


def request(
    connection: socket.socket,
    arguments: list[str],
    files: list[int],
    *,
    parent: int,
    tied: bool,
    numbers: list[int] | None = None,
    environment: dict[str, str] | None = None,
    directory: os.PathLike[str] | None = None,
) -> int:
    """Has a zygote run `python ARGUMENTS` and returns its process id.

    `files`: its open files, which have `numbers` there, the same by default. `parent`: the process that it takes for
    its parent. `tied`: whether it is killed when the connection closes. `directory`: this process's by default."""
    message = {
        "arguments": arguments,
        "environment": dict(os.environ) if environment is None else environment,
        "directory": os.fspath(directory or os.getcwd()),
        "numbers": files if numbers is None else numbers,
        "parent": parent,
        "tied": tied,
    }
    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files)
    connection.sendmsg([json.dumps(message).encode()], [rights])
    return int(connection.recv(16))


def status_from(message: bytes) -> int:
    """Returns the exit status in a zygote's last message, or -9 after the end of the zygote."""
    return int(message or -signal.SIGKILL)


def _inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # of the directory that was listed
        return False
