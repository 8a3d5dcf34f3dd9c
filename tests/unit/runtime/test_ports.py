"""Ports for servers that listen later: each is given to one process, as long as that process lives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from slimx.errors import SlimxError
from slimx.runtime import ports

FIRST = 31000 + 16 * (os.getpid() % 60)
AMONG = range(FIRST, FIRST + 16)
"""Ports for one process of tests: it claims some of them until it ends."""
DRAWS = "from slimx.runtime.ports import free_port; print(*(free_port() for _ in range(8)), flush=True); input()"


def test_no_two_processes_get_one_port_and_ports_are_returned(monkeypatch):
    monkeypatch.setattr(ports, "LISTENING", AMONG)
    monkeypatch.setattr(ports, "TRIES", 16)
    command = f"from slimx.runtime import ports; ports.LISTENING = {AMONG}; ports.TRIES = 16; {DRAWS}"
    other = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = {ports.free_port() for _ in range(16 - len(theirs) - _taken(AMONG))}
        assert len(theirs) == 8 and ours and not ours & theirs
        with pytest.raises(SlimxError) as none:
            ports.free_port()
        assert (none.value.code, none.value.about) == ("ports.none", "127.0.0.1")
        other.kill()
    assert ports.free_port() in theirs


def test_a_port_in_use_is_not_returned():
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        assert not ports._is_free("127.0.0.1", taken.getsockname()[1])


def _taken(among: range) -> int:
    """Returns the ports of `among` on which other programs listen."""
    return sum(not ports._is_free("127.0.0.1", port) for port in among)
