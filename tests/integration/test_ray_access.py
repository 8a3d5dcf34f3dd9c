"""The run's private Ray: clients without its token are refused, and what asks for none listens on this machine only."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from slimx.cluster.connection import start_ray, stop_ray
from slimx.config.schema import Config

pytestmark = pytest.mark.integration
RETRIES = "3"
"""Tries of a client that is refused, a second apart; Ray's own number is 20."""

CLIENT = """
import sys, ray
try:
    ray.init(sys.argv[1], log_to_driver=False)
except Exception as error:
    print("refused", type(error).__name__)
    sys.exit(3)
print("joined", ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote()))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts a Ray of the run's own; yields its address."""
    run = {"run": {"dir": "none"}, "model": {"path": "none"}, "rollout": {"prompts": "none", "engines": []}}
    config = Config.model_validate(run | {"algorithm": {"name": "sft"}, "cluster": {"device": "cpu"}})
    start_ray(config, "cpu")
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        stop_ray()


def join(address: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environment = kept | variables | {"RAY_NUM_REDIS_GET_RETRIES": RETRIES}
    return subprocess.run(
        [sys.executable, "-c", CLIENT, address], env=environment, capture_output=True, text=True, timeout=600
    )


def test_a_client_without_the_token_is_refused(started: str, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    strangers = {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)}
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda variables: join(started, **variables), strangers):
            assert done.returncode == 3 and done.stdout.startswith("refused"), done.stdout + done.stderr
    done = join(started, RAY_AUTH_MODE="token")
    assert done.stdout == "joined 7\n", done.stdout + done.stderr


def test_a_private_ray_starts_only_the_processes_that_a_run_uses(started: str) -> None:
    session = ray._private.worker._global_node.get_session_dir_path()
    names = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):  # of an earlier test
            names += [child.name()] if session in " ".join(child.cmdline()) else []
    assert sorted(names) == ["gcs_server", "raylet"]


def test_only_what_asks_for_the_token_listens_beyond_loopback(started: str) -> None:
    session = ray._private.worker._global_node.get_session_dir_path()
    beyond: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            line, environment = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        ours = session in " ".join(line) or environment.get("RAY_SESSION_DIR") == session or process.pid == os.getpid()
        for connection in process.net_connections("inet") if ours else ():
            address = ipaddress.ip_address(connection.laddr.ip)
            if connection.status == psutil.CONN_LISTEN and not address.is_loopback:
                beyond[str(address)] = beyond.get(str(address), 0) + 1
    # "::" is gRPC's, whose calls need the token; counters of Ray were at 0.0.0.0, its agents at the machine's address.
    assert beyond.keys() == {"::"}
