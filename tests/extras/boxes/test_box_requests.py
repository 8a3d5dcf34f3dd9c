"""Requests that no client of ours sends to the server of boxes are refused, and delay no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slimx.extras.boxes.leases import Boxes, Images
from slimx.extras.boxes.programs.enclosure import ProgramResult
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import BoxRefusal, check_run, names_of
from slimx.extras.boxes.serve import MAX_BODY, Service

BOX = "/v1/boxes/00aa00aa"
RUN = f"{BOX}/runs/0a0b0c0d"
GOOD = {"command": ["true"], "stdin": "", "cwd": "/"}


class Stub:
    """A box in which nothing runs."""

    def run(self, command, *, stdin, cwd, stop):
        return ProgramResult("", "", "exit", 0, 0.0)

    def put(self, path, content):
        names_of(path)

    def get(self, path, most):
        names_of(path)
        return b""

    def end(self):
        pass


@asynccontextmanager
async def client(tmp_path: Path) -> AsyncIterator[TestClient]:
    """Yields a client of a server, where one box has begun."""
    boxes = Boxes(lambda source, limits: Stub(), most=2, lease_s=60.0)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/base.tar").touch()
    service = Service(boxes, Images(tmp_path / "images", tmp_path, 1), Limits(), image_mib=1, token=None, engine=None)
    async with TestClient(TestServer(service.app())) as client:
        begun = await client.put(BOX, json={"image": "base.tar", "limits": {}})
        assert begun.status == 201
        yield client
    await boxes.close()


async def test_invalid_requests_are_refused_and_none_is_a_server_error(tmp_path):
    deep = b"[" * 100_000
    bodies = [
        *(b"", b"null", b"[]", b'"x"', b"1" * 5000, b"\xff\xfe", b'{"command"', deep, b'{"command":' + deep),
        *(json.dumps(GOOD | {"command": value}).encode() for value in ([], "true", [1], [["true"]], None, {"a": 1})),
        *(json.dumps(GOOD | {"command": ["a", value]}).encode() for value in ("b\0c", "\ud800", "x" * 2**17)),
        json.dumps(GOOD | {"command": ["x" * 2**16] * 17}).encode(),
        *(json.dumps(GOOD | {name: value}).encode() for name in ("stdin", "cwd") for value in (None, 1, "\ud800")),
        json.dumps(GOOD | {"cwd": "/\0"}).encode(),
    ]
    limits = [
        None,
        "seconds",
        {"seconds": 1e400},
        {"seconds": "1"},
        {"seconds": True},
        {"none": 1},
        {"seconds": []},
    ]
    async with client(tmp_path) as http:
        for body in bodies:
            answer = await http.put(RUN, data=body)
            assert answer.status == 400, body[:100]
            assert (await http.get(RUN)).status == 404, "and nothing was started"
        for value in [*limits, {"seconds": 10**400}]:
            body = json.dumps({"image": "base.tar", "limits": value})
            assert (await http.put("/v1/boxes/11aa11aa", data=body)).status == 400, value
        for path in ("file?path=", "file?path=/../x", "file?path=/a%00b", "file", "file?path=/x&most=x"):
            assert (await http.get(f"{BOX}/{path}")).status == 400, path
        assert (await http.get(f"{BOX}/file?path=/x&most={10**30}")).status == 413
        assert (await http.get(f"{BOX}/file?path=/x&most=-1")).status == 413
        for path in ("zz", "0" * 65, "..%2f..", "%00"):
            assert (await http.put(f"/v1/boxes/{path}", json={})).status in (400, 404), path
        assert (await http.put(RUN, data=b" " * (MAX_BODY + 1))).status == 413
        assert (await http.put(RUN, json=GOOD)).status == 202
        for wait in ("nan", "-1", "1e400"):
            assert (await http.get(f"{RUN}?wait={wait}")).status == 200
        assert (await http.get(f"{RUN}?wait=x")).status == 400


async def test_a_body_is_read_as_unicode_whatever_charset_its_header_names(tmp_path):
    """Python's punycode takes seconds for this one, in which the server would answer no other request."""
    slow = b"a" * 1_000_000 + b"-" + b"b" * 200_000
    async with client(tmp_path) as http, asyncio.timeout(60):
        for charset in ("punycode", "no-such", "idna", "utf-16"):
            kind = {"Content-Type": f"application/json; charset={charset}"}
            began = asyncio.get_running_loop().time()
            assert (await http.put(RUN, data=slow, headers=kind)).status == 400
            assert asyncio.get_running_loop().time() - began < 4.0, charset
        assert (await http.put(RUN, data=json.dumps(GOOD), headers=kind)).status == 202


@pytest.mark.parametrize("words", [["a\0"], ["\udcff"], ["x" * 2**17], ["x" * 2**16] * 17])
def test_impossible_command_words_reach_no_backend(words):
    with pytest.raises(BoxRefusal) as error:
        check_run(words, "", "/")
    assert error.value.code == "box.command"
    check_run(["x" * (2**17 - 1)], "a\0b", "/")
