"""The server of boxes: who may ask, how much it takes, and what becomes of boxes when either side has gone."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from slimx.data.records import Prompt
from slimx.extras.agents import tools
from slimx.extras.boxes import rootfs
from slimx.extras.boxes.programs.enclosure import MIB
from slimx.extras.boxes.programs.sandbox import Limits
from slimx.extras.boxes.protocol import BoxBusy, BoxLost
from slimx.extras.boxes.remote import MAX_FILE, RemoteBox, RemoteServer
from slimx.extras.boxes.terminal import tasks
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.tool_stand import context
from tests.extras.boxes import box_stand
from tests.extras.boxes.box_stand import SMALL, served
from tests.extras.boxes.calls import calling
from tests.extras.boxes.test_terminal import TERMINAL
from tests.processes import wait_for
from tests.refusals import refused

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit", "cp", "rm", "tar")

LEASE_S = 8.0
WORDS = ("--memory-mib", "128", "--disk-mib", "8", "--seconds", "60", "--boxes", "2", "--uploads-mib", "1")


@pytest.fixture(scope="module")
def place():
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        (Path(directory) / "images").mkdir()
        box_stand.image(Path(directory) / "images/base.tar")
        yield Path(directory)


@pytest.fixture(scope="module")
def server(place):
    with served(place, *WORDS, "--lease", str(LEASE_S), "--images", str(place / "images")) as (server, _):
        yield RemoteServer(server.url, server.token, retry_s=1.0)
    assert list(place.glob(f"{rootfs.PREFIX}*")) == [], "a server that is stopped ends its boxes"


@pytest.fixture
def box(server):
    made = RemoteBox("base.tar", SMALL, server=server)
    yield made
    made.end()


def state(server: RemoteServer) -> dict[str, float]:
    return requests.get(f"{server.url}/v1/", headers={"Authorization": f"Bearer {server.token}"}, timeout=300).json()


# Who may ask, and for what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", b"wrong", b"secret2", b"\xff\xfe"])
def test_nobody_is_answered_without_the_token(server, token):
    answer = requests.get(f"{server.url}/v1/", headers={"Authorization": b"Bearer " + token}, timeout=300)
    assert answer.status_code == 401 and "protocol" not in answer.text


def test_a_client_without_the_token_is_refused_before_the_run(server):
    with refused("box.token"):
        RemoteServer(server.url).check()


def test_a_server_that_others_reach_does_not_start_without_a_token():
    line = [sys.executable, "-m", "slimx.extras.boxes.serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--token-env" in done.stderr


@pytest.mark.parametrize("name", ["none", "../images/base.tar", "/etc", "..", "sha256-" + "0" * 64])
def test_an_image_that_is_none_of_the_server_is_refused(server, name):
    with refused("box.source", about=name):
        RemoteBox(name, SMALL, server=server)
    assert state(server)["held"] == 0


def test_limits_above_the_servers_are_refused(server):
    with refused("box.request"):
        RemoteBox("base.tar", Limits(memory_mib=129, disk_mib=8), server=server)


# How much it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "size"),
    [
        ("PUT", "{box}/file?path=/work/x", MAX_FILE + 1),
        ("PUT", "images/sha256-" + "0" * 64, 2**40),
        ("PUT", "{box}/runs/00aa00aa", 2**40),
    ],
)
def test_an_oversized_upload_is_refused_before_it_is_sent(server, box, method, path, size):
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    connection.putrequest(method, f"/v1/{path.format(box=box._path)}")
    connection.putheader("Authorization", f"Bearer {server.token}")
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    connection.send(b"x")
    assert connection.getresponse().status == 413
    connection.close()
    assert box.run(["true"]).ok


def test_an_archive_must_be_the_one_that_it_is_named_after(server):
    with refused("box.request"):
        server.request("PUT", "images/sha256-" + "1" * 64, data=b"else")


def test_archives_that_were_used_longest_ago_make_room(server):
    names = []
    for number in range(3):
        content = bytes([number]) * (MIB * 4 // 10)
        names.append(f"sha256-{hashlib.sha256(content).hexdigest()}")
        server.request("PUT", f"images/{names[-1]}", data=content)
        time.sleep(0.02)
        if number == 1:
            assert server.has_image(names[0]), "which is a use"
    assert [server.has_image(name) for name in names] == [True, False, True]


def test_a_client_waits_for_a_free_box_up_to_its_deadline(server, box):
    other = RemoteBox("base.tar", SMALL, server=server)
    with refused("box.busy", about=server.url, kind=BoxBusy):
        RemoteBox("base.tar", SMALL, server=server, patience=0.1)
    threading.Timer(0.5, other.end).start()
    RemoteBox("base.tar", SMALL, server=server, patience=300).end()


# Answers that were lost -----------------------------------------------------------------------------------------------


def test_a_call_that_is_made_again_is_not_done_again(server, box):
    run = f"{box._path}/runs/0a0b0c0d"
    body = {"command": ["sh", "-c", "echo x >> /work/count"], "stdin": "", "cwd": "/"}
    for _ in range(3):
        server.request("PUT", run, body=body)
        while server.request("GET", f"{run}?wait=5").status != 200:
            pass
        server.request("PUT", box._path, body={"image": "base.tar", "limits": {}})
    assert box.get("/work/count", 100) == b"x\n" and state(server)["held"] == 1


# Either side has gone -------------------------------------------------------------------------------------------------


def test_a_box_of_a_dead_client_is_ended_but_not_one_of_an_idle_client(server, box, place):
    before = state(server)["expired"]
    program = (
        "import os, sys; from slimx.extras.boxes.remote import RemoteBox, RemoteServer\n"
        "from slimx.extras.boxes.programs.sandbox import Limits\n"
        "RemoteBox('base.tar', Limits(memory_mib=128, disk_mib=8), server=RemoteServer(sys.argv[1], 'secret'))\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, server.url], check=True, timeout=300)
    wait_for(lambda: state(server)["expired"] == before + 1 and state(server)["held"] == 1)
    assert state(server)["left"] == 0 and len(list(place.glob(f"{rootfs.PREFIX}*"))) == 1
    assert box.run(["true"]).ok, "its client has renewed the lease"


def test_a_box_that_the_server_has_ended_is_lost_by_name(server):
    box = RemoteBox("base.tar", SMALL, server=server)
    server.request("DELETE", box._path)
    with refused("box.lost", about=server.url, kind=BoxLost):
        box.run(["true"])
    box.end()


async def test_a_restarted_server_removes_the_boxes_of_the_killed_one(place):
    directory = place / "killed"
    directory.mkdir()
    images = ("--images", str(place / "images"))
    prompt_of = {"image": "base.tar", "directory": "/work", "tests": {"command": ["true"]}}
    prompt = Prompt(id="p", **tasks.to_prompt({"prompt": "?"} | prompt_of))
    with served(directory, *WORDS, *images) as (server, process):
        started, seconds = threading.Event(), f"50.{os.getpid()}"

        def kill() -> None:
            wait_for(lambda: box_stand.runs(seconds))
            started.set()
            process.send_signal(signal.SIGKILL)

        threading.Thread(target=kill).start()
        os.environ["BOXES_TOKEN"] = "secret"
        try:
            box = {"backend": "remote", "url": server.url, "token_env": "BOXES_TOKEN", "patience": 1, "seconds": 60,
                   "memory_mib": 128, "disk_mib": 8, "retry": 1}  # fmt: skip
            ctx, _ = context(calling("shell", command=f"sleep {seconds}"), "Done.")
            with pytest.raises(GivenUp) as caught:
                options = {"box": box, "tasks": str(directory)}
                await tools.generate(
                    ctx, prompt, toolbox=TERMINAL, toolbox_options=options, call_deadline=300.0, open_deadline=300.0
                )
        finally:
            del os.environ["BOXES_TOKEN"]
        assert caught.value.reason == "tools lost" and started.is_set(), caught.value
    assert len(list(directory.glob(f"{rootfs.PREFIX}*"))) == 1
    with served(directory, *WORDS, *images):
        assert list(directory.glob(f"{rootfs.PREFIX}*")) == []


# A crowd without the token --------------------------------------------------------------------------------------------


def test_a_crowd_that_asks_nothing_takes_no_descriptors_from_boxes(place):
    directory = place / "crowd"
    directory.mkdir()
    under = ("prlimit", "--nofile=256:256")
    with served(directory, *WORDS, "--images", str(place / "images"), under=under) as (server, _), ExitStack() as crowd:
        address = urlsplit(server.url)
        box = RemoteBox("base.tar", SMALL, server=server)
        for number in range(300):
            half = crowd.enter_context(socket.create_connection((address.hostname, address.port)))
            half.sendall(b"GET /v1/ HTTP/1.1\r\n")
            if number % 50 == 0:
                assert box.run(["true"]).ok
        assert box.run(["echo", "x"]).stdout == "x\n" and state(server)["held"] == 1
        box.end()
    assert (directory / "server.log").read_text() == ""
    assert list(directory.glob(f"{rootfs.PREFIX}*")) == []
