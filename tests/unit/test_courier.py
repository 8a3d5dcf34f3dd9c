"""A courier that dies or hangs is told from a channel that breaks: the one is nobody's fault, the other an engine's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slimx.config.engines import Health
from slimx.engines.delivery.courier import CourierHandle
from slimx.engines.delivery.transports import GlooTransport, NcclTransport, make_transport
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import ReceiverLost, TransportLost
from slimx.reshard.transports.collective import ChannelError

BUCKET = PackedBucket("/proc/1/fd/3", 4, ((),))
MANIFEST = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3)


class FakeCourier:
    """An actor that answers at once; a method in `fails` raises."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def answer() -> str:
            await asyncio.sleep(60 if method in self.hangs else 0)
            if method in self.fails:
                raise self.fails[method]
            return "meeting" if method == "open" else ""

        def remote(*arguments: Any) -> asyncio.Task[str]:
            self.asked.append((method, *arguments))
            return asyncio.ensure_future(answer())

        return SimpleNamespace(remote=remote)


class FakeEngine:
    """The handle of an engine that takes what comes."""

    name, incarnation, nodes = "e0", 1, 2

    def __init__(self) -> None:
        self.fails: SlimxError | None = None

    async def join(self, meeting: str) -> None:
        assert meeting == "meeting"

    async def stage_received(self, packed: PackedBucket, bucket: int) -> None:
        if self.fails:
            raise self.fails


def config(tmp_path: Path, transport: str = "gloo") -> Any:
    return SimpleNamespace(
        run=SimpleNamespace(dir=str(tmp_path)),
        cluster=SimpleNamespace(start_deadline=5),
        publish=SimpleNamespace(directory=None, step_deadline=5, transport=transport),
        rollout=SimpleNamespace(health=Health(restarts=2), engines=[]),
    )


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors that were ended."""
    out: list[Any] = []
    monkeypatch.setattr(ray, "kill", out.append)
    return out


@pytest.fixture
def stand(tmp_path: Path) -> tuple[GlooTransport, FakeCourier, FakeEngine]:
    transport = GlooTransport(SimpleNamespace(actors=[None]), config(tmp_path), tmp_path / "courier.log")
    transport.courier._actor, transport.courier.incarnation = FakeCourier(), 1
    return transport, transport.courier._actor, FakeEngine()


def died() -> Exception:
    return ray.exceptions.RayActorError()


async def test_an_engine_is_connected_once_by_incarnation_of_either_end(stand):
    transport, courier, engine = stand
    for _ in range(2):
        await transport.connect(engine, MANIFEST)
    assert courier.asked == [("open", "e0", 3, "gloo", 2), ("join", "e0")]
    engine.incarnation += 1
    await transport.connect(engine, MANIFEST)
    transport.courier.incarnation += 1
    await transport.connect(engine, MANIFEST)
    assert [call[0] for call in courier.asked] == ["open", "join"] * 3


@pytest.mark.parametrize("where", ["courier", "engine"])
async def test_a_channel_that_breaks_is_its_engines_fault(stand, where):
    transport, courier, engine = stand
    broken = ChannelError("the gloo channel of engine e0 broke")
    if where == "engine":
        engine.fails = broken
    else:
        courier.fails["send"] = Exception()  # as Ray wraps it
        courier.fails["send"].cause = broken
    with pytest.raises(ReceiverLost, match="the gloo channel of engine e0 broke"):
        await transport.deliver(engine, BUCKET, 0)
    assert courier.asked[-1] == ("ready",), "the courier lives"


async def test_a_channel_that_breaks_because_the_courier_died_is_no_engines_fault(stand):
    transport, courier, engine = stand
    engine.fails = ChannelError("the other side has gone")
    courier.fails["ready"] = died()
    with pytest.raises(TransportLost, match="the courier beside trainer rank 0 died during ready of the courier"):
        await transport.deliver(engine, BUCKET, 0)
    with pytest.raises(TransportLost, match="does not run; publish again"):
        await transport.connect(engine, MANIFEST)


@pytest.mark.parametrize(("courier_lives", "kind"), [(True, ReceiverLost), (False, TransportLost)])
async def test_a_late_bucket_is_its_engines_fault_unless_the_courier_hangs(stand, killed, courier_lives, kind):
    transport, courier, engine = stand
    transport.step_deadline_s = 0.4
    courier.hangs |= {"send"} if courier_lives else {"send", "ready"}
    with pytest.raises(kind, match="engine e0 did not answer bucket 0" if courier_lives else "ready of the courier"):
        await transport.deliver(engine, BUCKET, 0)
    assert killed == ([] if courier_lives else [courier])


async def restart_fails() -> None:
    raise SlimxError("no room")


async def test_a_courier_that_dies_again_and_again_ends_the_run_and_the_reasons_are_told(stand):
    transport, courier, _ = stand
    courier.fails["send"] = died()
    with pytest.raises(TransportLost):
        await transport.courier.ask("send", "e0", BUCKET)
    transport.courier._start = restart_fails
    for _ in range(2):
        with pytest.raises(TransportLost, match="no room"):  # to be published again
            await transport.begin(MANIFEST)
    with pytest.raises(SlimxError) as told:
        await transport.begin(MANIFEST)
    assert (told.value.code, told.value.about) == ("courier.gone", "courier")
    first, second = transport.courier.restarts.history
    assert "courier beside trainer rank 0 died during send" in first.reason and second.reason == "no room"


def test_the_configured_transport_is_made(tmp_path):
    trainers = SimpleNamespace(actors=[None])
    made = make_transport(trainers, config(tmp_path, "nccl"), tmp_path)
    assert isinstance(made, NcclTransport) and made.backend == "nccl" and isinstance(made.courier, CourierHandle)
    for name in ("memory", "cuda_ipc"):
        assert not hasattr(make_transport(trainers, config(tmp_path, name), tmp_path), "courier")
