"""Network namespaces as hosts: one bridge, a link of limited rate to each host, and processes in them."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["slimx.reshard.publish", "slimx.reshard.pack.packer"])
NETWORK = "10.213.7"
ANSWER_S = 300
TURNS = itertools.count()
"""Counter for link names. A name is not reused at once, because the kernel removes a namespace's links with a delay."""


def unavailable() -> str | None:
    """Returns why namespaces cannot be created; None if they can."""
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"{missing[0]} (iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["ip", "netns", "add", f"slx{os.getpid()}p"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"network namespaces cannot be made: {probe.stderr.strip()}"
    run("ip", "netns", "del", f"slx{os.getpid()}p")
    return None


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True)
class Host:
    """A network namespace with one link."""

    name: str
    address: str
    link: str
    """Name of the link's end on the bridge."""

    def carried(self) -> tuple[int, int]:
        """Returns the bytes sent and received by the host, including the headers of Ethernet, IP and TCP."""
        output = subprocess.run(["ip", "-s", "-j", "link", "show", self.link], check=True, capture_output=True).stdout
        counted = json.loads(output)[0]["stats64"]
        return counted["rx"]["bytes"], counted["tx"]["bytes"]

    def cut(self) -> None:
        """Removes the link."""
        run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.link, "up")

    def limit(self, mbit: float, *, queue_kb: int | None = None) -> None:
        """Limits traffic to the host to `mbit` Mbit/s. Packets beyond a queue of `queue_kb` KB are lost; None: a queue
        of 0.1 s."""
        queue = ("latency", "100ms") if queue_kb is None else ("limit", f"{queue_kb}kb")
        burst = "256kb" if queue_kb is None else "4kb"
        run("tc", "qdisc", "replace", "dev", self.link, "root", "tbf", "rate", f"{mbit}mbit", "burst", burst, *queue)

    def dropped(self) -> int:
        """Returns the number of packets to the host that its link has lost since `limit`."""
        output = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", self.link], check=True, capture_output=True)
        return json.loads(output.stdout)[0]["drops"]


@contextmanager
def hosts(names: Sequence[str], mbit: float) -> Iterator[list[Host]]:
    """Creates hosts on one bridge, each with a link of `mbit` Mbit/s in each direction, and removes them at the end."""
    mark = f"{os.getpid() % 100000}{next(TURNS) % 10}"
    bridge, found = f"sb{mark}", []
    run("ip", "link", "add", bridge, "type", "bridge")
    try:
        run("ip", "link", "set", bridge, "up")
        for number, name in enumerate(names):
            space, link = f"slx{mark}{name}", f"s{mark}n{number}"
            host = Host(space, f"{NETWORK}.{number + 1}", link)
            run("ip", "netns", "add", space)
            found.append(host)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "net0", "netns", space)
            run("ip", "link", "set", link, "master", bridge, "up")
            inside = ("ip", "netns", "exec", space)
            run(*inside, "ip", "addr", "add", f"{host.address}/24", "dev", "net0")
            run(*inside, "ip", "link", "set", "net0", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms")
            run("tc", "qdisc", "add", "dev", link, *limit)
            run(*inside, "tc", "qdisc", "add", "dev", "net0", *limit)
        yield found
    finally:
        for host in found:
            for gone in (["ip", "link", "del", host.link], ["ip", "netns", "del", host.name]):
                subprocess.run(gone, capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


class Resident:
    """A process on a host with an object of `kind`, created there from the arguments. Threads may call `ask`; calls are
    serialized."""

    def __init__(self, host: Host, kind: type, *arguments: Any):
        self.host, self._turn = host, threading.Lock()
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_live, args=(other, host.name, kind, arguments), daemon=True)
        self.process.start()
        other.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the object; returns its result or raises its exception."""
        with self._turn:
            self.pipe.send((method, arguments))
            if not self.pipe.poll(ANSWER_S):
                raise TimeoutError(f"{method} on {self.host.name} was not answered within {ANSWER_S} s")
            answer, error = self.pipe.recv()
        if error is not None:
            raise error
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _live(pipe: Connection, space: str, kind: type, arguments: tuple[Any, ...]) -> None:
    with open(f"/var/run/netns/{space}", "rb") as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    # /sys shows the interfaces of the namespace in which it was mounted, and UCX finds its devices there.
    os.unshare(os.CLONE_NEWNS)
    run("mount", "--make-rslave", "/")
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    os.environ["UCX_TLS"] = "tcp"  # memory of one machine, which the hosts have in common, is not their link
    one = kind(*arguments)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(one, method)(*arguments), None))
        except Exception as error:
            pipe.send((None, error))
