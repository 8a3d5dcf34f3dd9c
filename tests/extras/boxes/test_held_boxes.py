"""The boxes that a server holds, where making or ending one fails or hangs."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.engines import ContainerEngine
from slimx.extras.boxes.leases import Boxes, Images
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import BoxLost, BoxRefusal
from slimx.extras.boxes.remote import RemoteBox
from slimx.extras.boxes.serve import Service
from slimx.extras.http.blocking import HttpResponse
from tests.refusals import refused
from tests.waits import until


class Fake:
    """A box whose end waits, or fails."""

    def __init__(self, source):
        self.source, self.may_end, self.ended = source, threading.Event(), 0

    def end(self):
        self.ended += 1
        if self.source == "fails":
            raise BoxLost("no", about="engine")
        if self.source == "hangs":
            assert self.may_end.wait(60)


@pytest.fixture
def made():
    return []


@pytest.fixture
def boxes(made):
    def make(source, limits):
        made.append(Fake(source))
        return made[-1]

    return Boxes(make, most=2, lease_s=0.2)


async def test_a_box_keeps_its_place_until_it_has_ended_and_is_ended_once(boxes, made):
    await boxes.begin("a", "hangs", None)
    ends = [asyncio.create_task(boxes.end("a")) for _ in range(2)]
    await until(lambda: made[0].ended)
    assert len(boxes.leases) == 1 and not any(end.done() for end in ends)
    with refused("box.lost", about="a"):
        await boxes.begin("a", "hangs", None)
    made[0].may_end.set()
    await asyncio.gather(*ends)
    assert boxes.leases == {} and made[0].ended == 1
    await boxes.close()


async def test_a_box_that_is_still_made_has_a_place_until_it_is_ended(made):
    go = threading.Event()

    def make(source, limits):
        assert go.wait(60)
        made.append(Fake(source))
        return made[-1]

    boxes = Boxes(make, most=1, lease_s=60)
    began = asyncio.create_task(boxes.begin("a", "ends", None))
    await until(lambda: boxes.leases)
    end = asyncio.create_task(boxes.end("a"))
    await asyncio.sleep(0.05)
    assert boxes.full and not end.done()
    go.set()
    await asyncio.gather(began, end)
    assert made[0].ended == 1 and not boxes.full
    await boxes.close()


async def test_one_box_that_does_not_end_keeps_no_other_and_failures_are_counted(boxes, made, capsys):
    await boxes.begin("a", "hangs", None)
    watch = asyncio.create_task(boxes.watch())
    await until(lambda: made[0].ended)
    await boxes.begin("b", "fails", None)
    await until(lambda: "b" not in boxes.leases)
    assert boxes.expired == 2 and boxes.left == 1 and "box b: " in capsys.readouterr().out
    assert "a" in boxes.leases
    watch.cancel()
    made[0].may_end.set()
    await boxes.close()


# Archives and images --------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(boxes, tmp_path):
    """A client of a server whose engine has one image."""

    class Engine(ContainerEngine):
        def ask(self, *words, **_):
            return type("Done", (), {"returncode": int(words[-1] != "python:3.12")})

    service = Service(boxes, Images(None, tmp_path, 1), Limits(), token=None, image_mib=1, engine=Engine(("podman",)))
    async with TestClient(TestServer(service.app())) as client:
        yield client
    await boxes.close()


@pytest.mark.parametrize(("name", "status"), [("python:3.12", 200), ("python:3.13", 404), ("--all", 404)])
async def test_a_server_of_containers_has_the_images_of_its_engine(client, name, status):
    assert (await client.get(f"/v1/images/{name}")).status == status


async def test_an_image_that_is_an_option_is_none(client):
    assert not ContainerEngine(("true",)).has_image("--all")  # `true` would have it


async def test_an_archive_that_is_another_drives_none_out(client, tmp_path):
    (tmp_path / f"sha256-{64 * '1'}").write_bytes(bytes(2**20))
    assert (await client.put(f"/v1/images/sha256-{64 * '2'}", data=b"else")).status == 400
    assert (tmp_path / f"sha256-{64 * '1'}").exists()


async def test_an_archive_has_one_deadline_in_all(client, monkeypatch):
    monkeypatch.setattr("slimx.extras.boxes.serve.UPLOAD_S", 0.3)

    async def drops():
        while True:
            yield b"x"
            await asyncio.sleep(0.05)

    headers = {"Content-Length": "1000"}
    async with asyncio.timeout(60):
        assert (await client.put(f"/v1/images/sha256-{64 * '3'}", data=drops(), headers=headers)).status == 408


# The client -----------------------------------------------------------------------------------------------------------


class Server:
    """Answers in order; the end is lost."""

    url = "http://boxes"

    def __init__(self, *statuses):
        self.statuses, self.received = list(statuses), []

    def has_image(self, name):
        return True

    def request(self, method, path, **_):
        self.received.append((method, path.split("/")[0]))
        if method == "DELETE":
            raise BoxLost("gone", about=self.url)
        if path.startswith("images"):
            return HttpResponse(201, b"", {})
        return HttpResponse(self.statuses.pop(0), b'{"lease_s": 3600}', {})


def test_an_archive_that_made_room_for_others_is_sent_again(tmp_path):
    (tmp_path / "root").mkdir()
    server = Server(404, 201)
    box = RemoteBox(tmp_path / "root", server=server)  # type: ignore[arg-type]
    assert server.received == [("PUT", "boxes"), ("PUT", "images"), ("PUT", "boxes")]
    box._closing.set()


def test_the_first_error_is_raised_rather_than_that_of_closing(tmp_path):
    with refused("box.source", about="none", kind=BoxRefusal):
        RemoteBox("none", server=Server(404))  # type: ignore[arg-type]


# What a box has made --------------------------------------------------------------------------------------------------


def test_a_copy_that_is_too_deep_for_python_is_removed(tmp_path):
    here = os.open(".", os.O_RDONLY)
    try:
        with rootfs.scratch(tmp_path) as place:
            assert place.holder.stat().st_mode & 0o777 == 0o700
            place.path.mkdir()
            os.chdir(place.path)
            for _ in range(1500):
                os.mkdir("d")
                os.chdir("d")
            os.chdir(here)
    finally:
        os.chdir(here)
        os.close(here)
    assert list(tmp_path.iterdir()) == []
