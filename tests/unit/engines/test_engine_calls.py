"""Late steps and late answers are dropped; a server that is gone is distinguished from one that refuses."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.engines.server import server as engine_server
from slimx.engines.server.engine import Engine, State
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import BEFORE_BEGIN, Receiver, ReceiverLost
from tests.refusals import refused


def manifest(epoch: int, version: int = 7) -> Manifest:
    return Manifest(policy="actor", version=version, trainer_step=version, membership_epoch=epoch)


class FakeWire:
    """The calls of a server; `fails` is raised by every one but `status`, which is silent while `silent` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: SlimxError | None = None
        self.silent = self.hangs = False
        self.staged: dict[str, Any] = {}

    async def request_ranks(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        if verb == "status":
            if self.silent:
                raise SlimxError("no connection")
            return []
        if verb == "begin":
            self.calls.append(f"begin {arguments['manifest']['membership_epoch']}")
        elif verb == "stage":
            self.staged = arguments["ranks"]
            self.calls.append(f"stage {arguments['bucket']}")
        await asyncio.sleep(600 if self.hangs else 0)
        if self.fails is not None:
            raise self.fails
        return []


BUCKET = PackedBucket("/there", 4, ((),))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """The server's port."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def engine(tmp_path: Path, listener: socket.socket) -> Engine:
    """An engine in a publication of epoch 0, whose server's process runs, listens and answers as the test has it."""
    port = listener.getsockname()[1]
    out = Engine(EngineSpec("e0", "m", "float32", "cpu", port), tmp_path / "log", 5)
    out.wire, out.process = FakeWire(), SimpleNamespace(ended=lambda: None, stop=lambda grace_s: None)
    out._listens, out.state, out.publication = True, State.READY, manifest(0)
    return out


def test_an_engine_does_every_verb_of_a_publication_as_the_protocol_has_it() -> None:
    verbs = {name: verb for name, verb in vars(Receiver).items() if inspect.iscoroutinefunction(verb)}
    assert set(BEFORE_BEGIN) < verbs.keys()
    for name, verb in verbs.items():
        required, found = (list(inspect.signature(one).parameters.values()) for one in (verb, getattr(Engine, name)))
        assert [one.name for one in found][: len(required)] == [one.name for one in required], name
        assert all(one.default is not one.empty for one in found[len(required) :]), name


async def test_steps_of_other_publications_do_not_reach_the_server(engine):
    with refused("engine.late", about="stage"):
        await engine.perform("stage", 3, 5, BUCKET, 0)
    await engine.perform("begin", 3, 5, manifest(3), "model")
    await engine.perform("stage", 3, 5, BUCKET, 0)
    await engine.perform("begin", 5, 5, manifest(5), "model")
    for late in (3, 4, 6):
        with refused("engine.late", about="stage"):
            await engine.perform("stage", late, 5, BUCKET, 1)
    for verb in BEFORE_BEGIN:
        with refused("engine.late", about=verb):
            await engine.perform(verb, 4, 5)
    await engine.perform("stage", 5, 5, BUCKET, 1)
    assert engine.wire.calls == ["begin 3", "stage 0", "begin 5", "stage 1"]


async def test_a_verb_that_the_engine_does_not_answer_ends_at_its_deadline(engine):
    engine.wire.hangs = True
    with refused("deadline", about="stage", kind=DeadlineError):
        await engine.perform("stage", None, 0.05, BUCKET, 0)
    assert engine.wire.calls == ["stage 0"]


async def test_requests_in_flight_end_with_their_server_start(engine):
    engine.wire.hangs = True
    waiting = asyncio.create_task(engine.perform("stage", None, 60, BUCKET, 0))
    while not engine.wire.calls:
        await asyncio.sleep(0)
    await engine.stop()
    engine.reset(engine.planned)
    engine.wire = after = FakeWire()
    with refused("engine.stopped", about="e0", kind=ReceiverLost):
        await waiting
    assert after.calls == [] and engine.state is State.DEAD


async def test_a_start_that_is_stopped_neither_goes_on_nor_ends_the_next_one(tmp_path):
    class Slow(Engine):
        """An engine whose first start does not end."""

        starts = 0

        async def _launch(self, deadline_s: float) -> None:
            self.reset(self._placed())
            self.starts += 1
            if self.starts == 1:
                await asyncio.Event().wait()

    engine = Slow(EngineSpec("e0", "m", "float32", "cpu"), tmp_path / "log")
    first = asyncio.create_task(engine.start(60))
    while not engine.starts:
        await asyncio.sleep(0)
    await engine.stop()
    await engine.start(60)
    with refused("engine.stopped", about="e0", kind=ReceiverLost):
        await first
    assert engine.state is State.READY


async def test_a_bucket_from_trainer_ranks_is_staged_where_it_landed(engine):
    wire = engine.wire

    class End:
        @asynccontextmanager
        async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
            wire.calls.append(f"land {packed.path}")
            yield replace(packed, path="/here")
            wire.calls.append("let go")

    engine.end = End()
    await engine.perform("begin", 3, 5, manifest(3), "model")
    await engine.perform("receive", 3, 5, BUCKET, 4)
    assert wire.calls == ["begin 3", "land /there", "stage 4", "let go"]
    assert wire.staged["all"]["fd_path"] == "/here"


@pytest.mark.parametrize(
    ("ended", "silent", "kind", "code", "about"),
    [
        (None, False, SlimxError, "bucket.checksum", "w"),
        (None, True, ReceiverLost, "bucket.checksum", "e0"),
        ("engine e0 was killed by SIGKILL", True, ReceiverLost, "engine.ended", "e0"),
    ],
)
async def test_a_refusal_differs_from_a_lost_server(engine, monkeypatch, ended, silent, kind, code, about):
    monkeypatch.setattr(engine_server, "ENDING_S", 0.2)
    engine.wire.fails = SlimxError("wrong checksum", code="bucket.checksum", about="w")
    engine.wire.silent, engine.process.ended = silent, lambda: ended
    with refused(code, about=about) as caught:
        await engine.perform("stage", None, 5, BUCKET, 0)
    assert type(caught.value) is kind


async def test_a_server_that_exits_right_after_a_broken_connection_has_ended(engine):
    engine.wire.fails, engine.wire.silent = SlimxError("disconnected", code="http.unreachable"), True
    asyncio.get_running_loop().call_later(0.5, setattr, engine.process, "ended", lambda: "killed by SIGKILL")
    with refused("engine.ended", about="e0", kind=ReceiverLost):
        await engine.perform("stage", None, 5, BUCKET, 0)


async def test_a_missing_bucket_is_a_fault_of_its_sender(engine):
    """A trainer rank that does not write is named, also where the server is silent."""

    class End:
        @asynccontextmanager
        async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
            raise SlimxError("nothing came", code="direct.missing", about="trainer rank 1")
            yield packed

    engine.end, engine.wire.silent = End(), True
    with refused("direct.missing", about="trainer rank 1") as caught:
        await engine.perform("receive", None, 5, BUCKET, 0)
    assert type(caught.value) is SlimxError


async def test_a_server_that_accepts_connections_is_alive(engine, listener, monkeypatch):
    assert await engine.ended() is None
    listener.close()
    engine._listens = False
    assert await engine.ended() is None, "it does not listen yet"
    engine._listens = True
    asyncio.get_running_loop().call_later(0.3, setattr, engine.process, "ended", lambda: "killed by SIGKILL")
    assert await engine.ended() == "killed by SIGKILL"
    engine.process.ended = lambda: None
    monkeypatch.setattr(engine_server, "ENDING_S", 0.2)
    message = await engine.ended()
    assert message.startswith("engine e0, ") and engine.spec.url in message


async def test_a_server_whose_port_is_taken_while_it_starts_gets_another(tmp_path):
    ports, taken = [], engine_server.PORTS - 1

    class Taken(Engine):
        """An engine whose server finds its port taken, `taken` times in a row."""

        async def _launch(self, deadline_s: float) -> None:
            self.reset(self._placed())
            ports.append(self.spec.port)
            if len(ports) <= taken:
                raise SlimxError("taken", code="engine.port")

    engine = Taken(EngineSpec("e0", "m", "float32", "cpu"), tmp_path / "log")
    spec, _ = await engine.start(5)
    assert spec.url == f"http://127.0.0.1:{ports[-1]}" and engine.state is State.READY
    assert len(set(ports)) == engine_server.PORTS

    ports.clear()
    taken = engine_server.PORTS
    await engine.stop()
    with refused("engine.port"):
        await engine.start(5)
    assert len(ports) == engine_server.PORTS and engine.state is State.DEAD


def sockets() -> set[str]:
    """Returns the sockets that this process has open, by inode."""
    found = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of listdir itself, and those that other threads close
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {target for target in found if target.startswith("socket:")}


@pytest.mark.parametrize(("role", "ports"), [("regular", 1), ("prefill", 2)])
def test_an_engine_keeps_the_ports_of_its_present_server_alone(role: str, ports: int, tmp_path: Path) -> None:
    """Each start takes new ones: a run of thousands of restarts would else hold all that there are."""
    before = sockets()
    engine = Engine(EngineSpec("e0", "/", "float32", "cpu", role=role), tmp_path / "log")
    specs = [engine._placed() for _ in range(5)]
    assert len(sockets() - before) == ports
    assert len({spec.port for spec in specs} | {spec.bootstrap_port for spec in specs} - {None}) > 1
