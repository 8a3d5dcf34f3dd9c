"""Processes meet at one address, which other machines cannot reach in a run on one machine."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from threading import Thread

import psutil
import pytest

from slimx.adapters.sglang import hooks as sglang_hooks
from slimx.cluster.access import ADDRESS, local_options
from slimx.config.sections.general import Cluster
from slimx.engines.server.spec import EngineSpec, NodeShare, server_env
from slimx.errors import SlimxError
from slimx.runtime.ports import LOOPBACK, free_port, local_address, meet
from slimx.runtime.user_files import private_directory, private_token
from tests.refusals import invalid
from tests.warm.sglang import run_with_sglang

LIMIT = timedelta(seconds=60)


def listening() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("how", ["meet", "sglang"])
def test_ranks_meet_at_one_address_only(how: str) -> None:
    port, stores = free_port(), {}

    def join(rank: int) -> None:
        if how == "meet":
            stores[rank] = meet("127.0.0.1", port, rank=rank, size=2, timeout=LIMIT)
        else:
            stores[rank] = sglang_hooks.at_one_address("127.0.0.1", port, rank, 2, LIMIT, use_libuv=True)

    threads = [Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    assert {where for where in listening() if where[1] == port} == {("127.0.0.1", port)}


HOOKED = """
import sys
from datetime import timedelta
import psutil, torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from slimx.adapters.sglang import hooks as sglang_hooks
HookRegistry.register(sglang_hooks.CREATE_STORE, sglang_hooks.at_one_address, HookType.REPLACE)
HookRegistry.apply_hooks()
where = f"tcp://127.0.0.1:{sys.argv[1]}"
dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=60))
print(sorted({c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}))
print(int(sys.argv[1]) in {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"})
"""


def test_a_process_of_sglang_listens_on_loopback_only() -> None:
    """The adapter is installed by SGLang's own hooks, and the address taken through torch's own rendezvous."""
    done = run_with_sglang("-c", HOOKED, str(free_port()), environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.stdout.splitlines() == ["['127.0.0.1']", "True"], done.stdout + done.stderr


def test_servers_take_their_address_in_the_named_network() -> None:
    assert Cluster().network == LOOPBACK and local_address(LOOPBACK) == "127.0.0.1"
    assert Cluster(trusted_network="10.0.0.0/8").network == LOOPBACK, "one machine needs no network"
    assert Cluster(ray_address="auto", trusted_network=True).network is None
    assert Cluster(ray_address="auto", trusted_network="10.0.0.0/8").network == "10.0.0.0/8"
    with pytest.raises(SlimxError) as error:
        local_address("203.0.113.0/24")
    assert (error.value.code, error.value.about) == ("cluster.network", "203.0.113.0/24")
    with invalid("cluster.trusted_network", about="cluster.trusted_network"):
        Cluster(trusted_network="office")


def test_servers_of_several_machines_hear_these_machines_only() -> None:
    second = NodeShare(1, 2, "10.0.0.1:31000", ("10.0.0.1", "10.0.0.2"))
    spec = EngineSpec("e", "/model", "bfloat16", "cuda", 31000, host="10.0.0.2", node=second)
    environment = server_env(spec)
    assert environment["SGLANG_ZMQ_ALLOWED_PEERS"] == "10.0.0.1,10.0.0.2"
    assert environment["SGLANG_ZMQ_SOURCE_IP"] == "10.0.0.2"
    assert "GLOO_SOCKET_IFNAME" not in environment
    alone = server_env(EngineSpec("e", "/model", "float32", "cpu", 31000))
    assert alone["GLOO_SOCKET_IFNAME"] == "lo" and "SGLANG_ZMQ_ALLOWED_PEERS" not in alone


STRANGER = """
import os, pickle, sys, zmq
from sglang.srt.managers.io_struct import sock_recv
from sglang.srt.utils.network import get_zmq_socket

class Program:
    def __init__(self, executed):
        self.executed = executed

    def __reduce__(self):
        return os.mkdir, (self.executed,)

context = zmq.Context()
for number, sent in enumerate(sys.argv[2:]):
    port, executed = sys.argv[1].split(",")[number], f"executed-{sent}"
    receiver = get_zmq_socket(context, zmq.PULL, f"tcp://127.0.0.1:{port}", True)
    sender = context.socket(zmq.PUSH)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(f"tcp://{sent}:0;127.0.0.1:{port}")
    try:
        sender.send(pickle.dumps(Program(executed)), zmq.NOBLOCK)
    except zmq.Again:  # a peer that was rejected before it sent has no connection
        pass
    if receiver.poll(5000):
        try:
            sock_recv(receiver)
        except Exception:
            pass
        print("heard", sent, flush=True)
os._exit(0)
"""


def test_a_strangers_pickle_does_not_reach_sglangs_sockets(tmp_path: Path) -> None:
    """The sockets are opened by SGLang's own functions, with the variables that its servers get. A machine of the
    server itself is heard, and what it sends is run: this is what `cluster.trusted_network` is about."""
    share = NodeShare(0, 2, "127.0.0.1:31000", ("127.0.0.1", "127.0.0.1"))
    environment = server_env(EngineSpec("e", "/model", "float32", "cpu", 31000, node=share))
    done = run_with_sglang(
        *("-c", STRANGER, f"{free_port()},{free_port()}", "127.0.0.1", "127.0.0.9"),
        environment={**environment, "SGLANG_USE_PICKLE_IPC": "1"},
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1:] == ["heard 127.0.0.1"], done.stdout + done.stderr
    assert [path.name for path in tmp_path.glob("executed-*")] == ["executed-127.0.0.1"]


def test_rays_token_is_its_owners_and_stays_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ray" / "token"
    for _ in range(2):
        token = private_token(file)
        assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == token and len(token) == 64
        file.chmod(0o644)  # as Ray leaves it
    assert private_token(file) == token and file.stat().st_mode & 0o777 == 0o600
    file.write_text("")  # as a process that was killed leaves it
    assert len(private_token(file)) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert local_options() == {"_node_ip_address": ADDRESS, "_temp_dir": str(private_directory() / "ray")}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SlimxError) as error:
        local_options()
    assert (error.value.code, error.value.about) == ("ray.no_token", "RAY_AUTH_MODE")
