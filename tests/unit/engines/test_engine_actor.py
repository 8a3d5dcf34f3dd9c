"""Late steps and late answers reach nobody; a server that is gone is told from one that refuses."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimx.cluster.waiting import ActorDied
from slimx.engines.fleet import actor as engine_actor
from slimx.engines.fleet.actor import EngineActor
from slimx.engines.fleet.handle import EngineHandle, Standing, kernels_of
from slimx.engines.server.control import PortTaken
from slimx.engines.server.engine import Engine, State
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.parties import BEFORE_BEGIN, Receiver, ReceiverLost
from tests.refusals import refused
from tests.virtual_time import run_virtually


def manifest(epoch: int, version: int = 7) -> Manifest:
    return Manifest(policy="actor", version=version, trainer_step=version, membership_epoch=epoch)


class FakeEngine:
    """The server's side; `fails` is raised by every step, `ended` and `silent` are what became of the server."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: SlimxError | None = None
        self.status: int | None = None
        self.silent = self.hangs = False
        self.staged: object = None
        self.state = State.READY
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        self.spec = SimpleNamespace(name="e0", host="127.0.0.1", port=port, url=url, external=False)
        self.process = SimpleNamespace(poll=lambda: self.status, log_path="e0.log", tail=lambda: "Killed")
        self.control = SimpleNamespace(status=self._status)

    async def _status(self) -> list:
        if self.silent:
            raise SlimxError("no connection")
        return []

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(600 if self.hangs else 0)
        if self.fails is not None:
            raise self.fails

    async def begin(self, manifest: Manifest, staging: str) -> None:
        await self._step(f"begin {manifest.membership_epoch}")

    async def stage(self, packed: object, bucket: int) -> None:
        self.staged = packed
        await self._step(f"stage {bucket}")


@pytest.fixture
def actor(tmp_path: Path) -> EngineActor:
    out = EngineActor({"name": "e0", "model_path": "m", "dtype": "float32", "device": "cpu"}, str(tmp_path / "log"), 5)
    out.engine = FakeEngine()
    return out


def test_engine_and_actor_do_every_verb_of_a_publication_as_the_protocol_has_it() -> None:
    verbs = {name: verb for name, verb in vars(Receiver).items() if inspect.iscoroutinefunction(verb)}
    assert set(engine_actor.BESIDE) < verbs.keys() and set(BEFORE_BEGIN) < verbs.keys()
    for name, verb in verbs.items():
        done = getattr(EngineActor if name in engine_actor.BESIDE else Engine, name)
        wanted, found = (list(inspect.signature(each).parameters.values()) for each in (verb, done))
        assert [each.name for each in found][: len(wanted)] == [each.name for each in wanted], name
        assert all(each.default is not each.empty for each in found[len(wanted) :]), name


async def test_a_step_of_another_publication_than_the_one_begun_last_does_not_reach_the_server(actor):
    with refused("engine.late", about="stage"):
        await actor.perform("stage", 3, 5, None, 0)
    await actor.perform("begin", 3, 5, manifest(3), "model")
    await actor.perform("stage", 3, 5, None, 0)
    await actor.perform("begin", 5, 5, manifest(5), "model")
    for late in (3, 4, 6):
        with refused("engine.late", about="stage"):
            await actor.perform("stage", late, 5, None, 1)
    for verb in BEFORE_BEGIN:
        with refused("engine.late", about=verb):
            await actor.perform(verb, 4, 5)
    await actor.perform("stage", 5, 5, None, 1)
    assert actor.engine.calls == ["begin 3", "stage 0", "begin 5", "stage 1"]


async def test_a_verb_that_the_engine_does_not_answer_ends_at_its_deadline(actor):
    actor.engine.hangs = True
    with refused("deadline", about="stage", kind=DeadlineError):
        await actor.perform("stage", None, 0.05, None, 0)
    assert actor.engine.calls == ["stage 0"]


async def test_what_comes_from_trainer_ranks_is_staged_as_it_landed(actor):
    class End:
        @asynccontextmanager
        async def landed(self, packed: str) -> AsyncIterator[str]:
            actor.engine.calls.append(f"land {packed}")
            yield f"{packed} here"
            actor.engine.calls.append("let go")

    actor.end = End()
    await actor.perform("begin", 3, 5, manifest(3), "model")
    await actor.perform("receive", 3, 5, "bucket", 4)
    assert (
        actor.engine.calls == ["begin 3", "land bucket", "stage 4", "let go"] and actor.engine.staged == "bucket here"
    )


@pytest.mark.parametrize(
    ("status", "silent", "kind", "code", "about"),
    [
        (None, False, SlimxError, "bucket.checksum", "w"),
        (None, True, ReceiverLost, "bucket.checksum", "e0"),
        (137, True, ReceiverLost, "engine.ended", "e0"),
    ],
)
async def test_a_refusal_is_told_from_a_server_that_is_gone(actor, status, silent, kind, code, about):
    actor.engine.fails = SlimxError("wrong checksum", code="bucket.checksum", about="w")
    actor.engine.status, actor.engine.silent = status, silent
    with refused(code, about=about) as told:
        await actor.perform("stage", None, 5, None, 0)
    assert type(told.value) is kind


async def test_a_server_that_takes_connections_is_alive_and_one_that_refuses_them_is_about_to_end(actor, monkeypatch):
    engine = actor.engine
    assert await actor.ended() is None
    engine.listener.close()
    engine.state = State.STARTING
    assert await actor.ended() is None, "it does not listen yet"
    engine.state = State.READY
    asyncio.get_running_loop().call_later(0.3, setattr, engine, "status", 137)
    told = await actor.ended()
    assert told.startswith("engine e0 ") and "SIGKILL" in told.splitlines()[0]
    engine.status = None
    monkeypatch.setattr(engine_actor, "ENDING_S", 0.2)
    told = await actor.ended()
    assert told.startswith("engine e0, ") and engine.spec.url in told


class FakeActor:
    """An actor whose answers the test gives: `answers[method]` is a future."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future] = {}

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments: object) -> asyncio.Future:
            self.answers[method] = asyncio.get_running_loop().create_future()
            return self.answers[method]

        return SimpleNamespace(remote=remote)


async def started(deadline_s: float = 5, epochs: tuple[int, ...] = ()) -> tuple[EngineHandle, FakeActor]:
    actor = FakeActor()
    handle = EngineHandle("e0", lambda: actor, Path("e0.log"), deadline_s)
    start = asyncio.create_task(handle.start(5))
    while "start" not in actor.answers:
        await asyncio.sleep(0)
    ranks = [{"epoch": epoch} for epoch in epochs]
    actor.answers["start"].set_result({"url": "http://e0", "bootstrap_port": None, "attestation": ranks})
    await start
    return handle, actor


async def test_an_engine_knows_the_newest_epoch_that_its_server_has_seen():
    assert (await started(epochs=(-1, 4)))[0].epoch == 4
    assert (await started())[0].epoch == -1


def test_kernels_are_told_as_the_first_rank_attests_them():
    ranks = [{"epoch": 0, "backends": {"moe_runner_backend": "triton", "deterministic": False}}, {"epoch": 0}]
    assert kernels_of(ranks) == "moe_runner_backend triton, deterministic False"
    assert kernels_of([]) == kernels_of([{"epoch": 0}]) == ""


async def test_whoever_waits_for_a_lost_engine_is_told_at_once_and_its_late_answer_reaches_nobody():
    handle, actor = await started()
    assert handle.standing is Standing.JOINING and handle.incarnation == 1
    waiting = asyncio.create_task(handle.perform("load", 3))
    while "perform" not in actor.answers:
        await asyncio.sleep(0)
    reason = "it does not generate"
    handle.lose(SlimxError(reason))
    with refused("engine.lost", about="e0", kind=ReceiverLost) as told:
        await asyncio.wait_for(waiting, 60)
    assert str(told.value) == reason
    if not actor.answers["perform"].done():
        actor.answers["perform"].set_result("late")
    with refused("engine.lost", about="e0", kind=ReceiverLost) as told:
        await handle.perform("verify", 3)
    assert str(told.value) == reason


@pytest.mark.parametrize("error", [ActorDied("its actor died"), DeadlineError("load", 5, "engine e0")])
async def test_a_dead_actor_and_a_missed_deadline_are_losses(error):
    handle, actor = await started()
    waiting = asyncio.create_task(handle.perform("load", 3))
    while "perform" not in actor.answers:
        await asyncio.sleep(0)
    actor.answers["perform"].set_exception(_Failed(error))
    with refused("engine.silent", about="e0", kind=ReceiverLost) as told:
        await waiting
    assert str(told.value) == str(error)


def test_a_silent_actor_is_killed_without_waiting_for_its_stop(monkeypatch):
    killed: list[object] = []

    async def kill(actors: list[object]) -> None:
        killed.extend(actors)

    async def stopped() -> float:
        handle, actor = await started()
        await handle.stop(grace_s=0)
        assert handle.actor is None and killed == [actor]
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("slimx.engines.fleet.handle.kill", kill)
    assert run_virtually(stopped()) == engine_actor.ANSWER_S


async def test_an_engine_sleeps_from_any_state_and_one_that_started_awake_sleeps_before_it_is_woken():
    handle, actor = await started()
    told: list[tuple[object, ...]] = []

    def answering(method: str) -> SimpleNamespace:
        async def answer(*arguments: object) -> object:
            told.append((method, *arguments))
            return "READY" if len(told) == 3 else "ASLEEP"

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(answer(*arguments)))

    handle.actor = SimpleNamespace(**{name: answering(name) for name in ("state", "perform")})
    await handle.sleep()
    await handle.wake()
    await handle.wake()
    done = [("perform", verb, None, 5, *rest) for verb, *rest in (("pause",), ("sleep",), ("wake", ("weights",)))]
    assert told == [*done[:2], ("state",), *done, ("state",), done[2]]


class _Failed(Exception):
    """As Ray hands on what an actor raised."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


async def test_an_engine_whose_actor_is_gone_is_lost_to_every_call_that_comes_later():
    """Quarantined between two calls and never started again: the publication goes on with the others."""
    handle = EngineHandle("e0", SimpleNamespace, Path("e0.log"), 5)
    handle.actor = None
    for verb in ("pause", "begin", "inventory", "abort"):
        with refused("engine.not_running", about="e0", kind=ReceiverLost):
            await handle.perform(verb, 1)
    handle._lost = asyncio.get_running_loop().create_future()
    handle.lose(SlimxError("it hung"))
    with refused("engine.lost", about="e0", kind=ReceiverLost) as told:
        await handle.perform("load", 1)
    assert await handle.ended() == str(told.value) == "it hung"


async def test_a_server_whose_port_is_taken_while_it_starts_gets_another(actor, monkeypatch):
    ports, taken = [], 0

    class Server(FakeEngine):
        """A server that finds its port taken, `taken` times in a row."""

        def __init__(self, spec: SimpleNamespace, log_path: str) -> None:
            super().__init__()
            self.spec, self.attestation, self.state = spec, [], State.STARTING

        def start(self) -> None:
            ports.append(self.spec.port)

        async def wait_ready(self, deadline_s: float) -> None:
            if len(ports) <= taken:
                raise PortTaken("taken", code="engine.port")

        async def stop(self, grace_s: float) -> None:
            self.state = State.DEAD

    monkeypatch.setattr(engine_actor, "Engine", Server)
    taken = engine_actor.PORTS - 1
    started = await actor.start(5)
    assert started["url"] == f"http://127.0.0.1:{ports[-1]}"
    assert len(set(ports)) == engine_actor.PORTS

    ports.clear()
    taken = engine_actor.PORTS
    with pytest.raises(PortTaken):
        await actor.start(5)
    assert len(ports) == engine_actor.PORTS


def sockets() -> set[str]:
    """Returns the sockets that this process has open, by inode."""
    found = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of listdir itself, and those that other threads close
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {each for each in found if each.startswith("socket:")}


@pytest.mark.parametrize(("role", "ports"), [("regular", 1), ("prefill", 2)])
def test_an_actor_keeps_the_ports_of_its_present_server_alone(role: str, ports: int) -> None:
    """Each start takes new ones: a run of thousands of restarts would else hold all that there are."""
    before = sockets()
    actor = EngineActor({"name": "e0", "model_path": "/", "dtype": "float32", "device": "cpu", "role": role}, "", 1.0)
    specs = [actor._spec() for _ in range(5)]
    assert len(sockets() - before) == ports
    assert len({spec.port for spec in specs} | {spec.bootstrap_port for spec in specs} - {None}) > 1
