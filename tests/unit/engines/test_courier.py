"""A courier that dies or hangs is told from a channel that breaks: the one is nobody's fault, the other an engine's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slimx.cluster import waiting
from slimx.cluster.place import Placement
from slimx.cluster.restarts import Restarts
from slimx.config.sections.engines import Health
from slimx.engines.delivery.deliveries import ChannelDelivery, DiskDelivery, MemoryDelivery, make_delivery
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, ReceiverLost, TransportLost
from slimx.reshard.transports.collective import ChannelError
from tests.refusals import refused

pytestmark = pytest.mark.costly

BUCKET = PackedBucket("/proc/1/fd/3", 4, ((),))
WRITTEN = PackedBucket("/shelf/bucket-0", 4, ((),))
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
            return {"open": "meeting", "write": WRITTEN}.get(method, "")

        def remote(*arguments: Any) -> asyncio.Task[str]:
            self.asked.append((method, *arguments))
            return asyncio.ensure_future(answer())

        return SimpleNamespace(remote=remote)


class FakeEngine:
    """The handle of an engine that takes what comes."""

    name, incarnation, nodes = "e0", 1, 2

    def __init__(self) -> None:
        self.fails: SlimxError | None = None

    async def perform(self, verb: str, epoch: int, *arguments: Any) -> None:
        assert (verb, epoch, *arguments) in (("join", 3, "meeting"), ("receive", 3, BUCKET, 0))
        if self.fails:
            raise self.fails


def config(tmp_path: Path, transport: str = "gloo") -> Any:
    return SimpleNamespace(
        run=SimpleNamespace(dir=str(tmp_path)),
        cluster=SimpleNamespace(start_deadline=5),
        publish=SimpleNamespace(directory=None, engine_deadline=5, transport=transport),
        rollout=SimpleNamespace(health=Health(restarts=2), engines=[]),
    )


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors that were ended."""
    out: list[Any] = []
    monkeypatch.setattr(ray, "kill", out.append)
    return out


@pytest.fixture
def stand(tmp_path: Path) -> tuple[ChannelDelivery, FakeCourier, FakeEngine]:
    delivery = made(tmp_path, "gloo")
    delivery.courier._actor, delivery.courier.incarnation = FakeCourier(), 1
    return delivery, delivery.courier._actor, FakeEngine()


def made(tmp_path: Path, transport: str) -> Delivery:
    restarts = Restarts("courier", Health(restarts=2), note=lambda text: None)
    return make_delivery(lambda: [None], config(tmp_path, transport), tmp_path, restarts)


def test_a_transport_without_a_delivery_is_refused_by_name(tmp_path: Path) -> None:
    with refused("publish.transport", about="pigeon"):
        made(tmp_path, "pigeon")


def died() -> Exception:
    return ray.exceptions.RayActorError()


async def test_an_engine_is_connected_once_by_incarnation_of_either_end(stand):
    delivery, courier, engine = stand
    for _ in range(2):
        await delivery.connect(engine, 3)
    assert courier.asked == [("open", "e0", 3, "gloo", 2), ("join", "e0")]
    engine.incarnation += 1
    await delivery.connect(engine, 3)
    delivery.courier.incarnation += 1
    await delivery.connect(engine, 3)
    assert [call[0] for call in courier.asked] == ["open", "join"] * 3


@pytest.mark.parametrize("where", ["courier", "engine"])
async def test_a_channel_that_breaks_is_its_engines_fault(stand, where):
    delivery, courier, engine = stand
    broken = ChannelError("the gloo channel of engine e0 broke")
    if where == "engine":
        engine.fails = broken
    else:
        courier.fails["send"] = Exception()  # as Ray wraps it
        courier.fails["send"].cause = broken
    with refused("channel.lost", about="e0", kind=ReceiverLost) as told:
        await delivery.bring(engine, 3, BUCKET, 0)
    assert str(told.value) == str(broken)
    assert courier.asked[-1] == ("ready",), "the courier lives"


async def test_a_channel_that_breaks_because_the_courier_died_is_no_engines_fault(stand):
    delivery, courier, engine = stand
    engine.fails = ChannelError("the other side has gone")
    courier.fails["ready"] = died()
    with refused("courier.lost", about="courier", kind=TransportLost):
        await delivery.bring(engine, 3, BUCKET, 0)
    with refused("courier.down", about="courier", kind=TransportLost):
        await delivery.connect(engine, 3)


@pytest.mark.parametrize(
    ("courier_lives", "code", "about", "kind"),
    [(True, "channel.lost", "e0", ReceiverLost), (False, "courier.lost", "courier", TransportLost)],
)
async def test_a_late_bucket_is_its_engines_fault_unless_the_courier_hangs(
    stand, killed, courier_lives, code, about, kind
):
    delivery, courier, engine = stand
    delivery.step_deadline_s = 0.4
    courier.hangs |= {"send"} if courier_lives else {"send", "ready"}
    with refused(code, about=about, kind=kind):
        await delivery.bring(engine, 3, BUCKET, 0)
    assert killed == ([] if courier_lives else [courier])


async def restart_fails() -> None:
    raise SlimxError("no room")


async def test_a_courier_that_dies_again_and_again_ends_the_run_and_the_reasons_are_told(stand):
    delivery, courier, _ = stand
    courier.fails["send"] = died()
    with pytest.raises(TransportLost):
        await delivery.courier.ask("send", "e0", BUCKET)
    delivery.courier._start = restart_fails
    for _ in range(2):
        with refused("courier.restart", about="courier", kind=TransportLost):  # to be published again
            await delivery.begin(MANIFEST, 1)
    with pytest.raises(SlimxError) as told:
        await delivery.begin(MANIFEST, 1)
    assert (told.value.code, told.value.about) == ("courier.gone", "courier")
    first, second = delivery.courier.restarts.history
    assert "rank 0" in first.reason and "send" in first.reason and second.reason == "no room"


def test_the_configured_delivery_is_made(tmp_path):
    for name in ("gloo", "nccl"):
        assert isinstance(made(tmp_path, name), ChannelDelivery) and made(tmp_path, name).backend == name
    assert isinstance(made(tmp_path, "disk"), DiskDelivery)
    for name in ("memory", "cuda_ipc"):
        assert type(made(tmp_path, name)) is MemoryDelivery


async def test_a_version_is_complete_on_disk_once_all_of_its_buckets_are_written(tmp_path):
    """Whatever became of it at the engines: one that comes back catches up from it."""
    delivery = made(tmp_path, "disk")
    courier = delivery.courier._actor = FakeCourier()
    await delivery.begin(MANIFEST, 2)
    for bucket in range(2):
        await delivery.end()
        assert ("commit",) not in courier.asked
        assert await delivery.take(BUCKET, bucket) is WRITTEN, "the source may release its own"
        assert delivery.wire == 4 * (bucket + 1)
    for _ in range(2):
        await delivery.end()
    assert [call[0] for call in courier.asked] == ["begin", "write", "write", "commit"]
    assert delivery.kept(7) is None and delivery.keeps


@pytest.mark.parametrize("lives", [True, False])
async def test_a_bucket_whose_owner_died_is_no_engines_fault(tmp_path: Path, lives: bool, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "DEATH_S", 0.1)

    class Publisher:
        """An actor as far as it is asked whether it lives."""

        async def answer(self) -> None:
            if not lives:
                raise died()

        ping = SimpleNamespace(remote=lambda: Publisher().answer())

    class Gone:
        """An engine that cannot open the bucket."""

        name = "e0"

        async def perform(self, verb: str, *arguments: Any) -> None:
            raise SlimxError("it cannot be opened", code="bucket.gone", about="e0")

    restarts = Restarts("courier", Health(restarts=2), note=lambda text: None)
    delivery = make_delivery(lambda: [Publisher()], config(tmp_path, "memory"), tmp_path, restarts)
    await delivery.begin(None, 1)
    kind, code = (SlimxError, "bucket.gone") if lives else (TransportLost, "publish.source")
    with refused(code, kind=kind):
        await delivery.bring(Gone(), 3, BUCKET, 0)


async def test_a_channel_on_which_an_engine_may_still_wait_is_opened_anew(stand) -> None:
    delivery, courier, engine = stand
    await delivery.connect(engine, 3)
    courier.fails["send"] = SlimxError("it cannot be opened", code="bucket.gone", about="e0")
    with refused("actor.failed"):
        await delivery.bring(engine, 3, BUCKET, 0)
    courier.fails.clear()
    await delivery.connect(engine, 3)
    assert [call[0] for call in courier.asked] == ["open", "join", "send", "open", "join"]


@pytest.mark.parametrize("moved", [True, False])
async def test_a_courier_follows_a_publisher_that_runs_elsewhere_now(tmp_path: Path, moved: bool, monkeypatch) -> None:
    delivery = made(tmp_path, "gloo")
    handle, started = delivery.courier, []

    async def start() -> None:
        started.append(1)
        handle._actor, handle._place = FakeCourier(), places[-1]
        handle.incarnation += 1

    async def place() -> Placement:
        return places[-1]

    places = [Placement("here")]
    monkeypatch.setattr(handle, "_start", start)
    monkeypatch.setattr(handle, "_publisher_place", place)
    await handle.start()
    places.append(Placement("there" if moved else "here"))
    await handle.start()
    assert len(started) == 1, "nobody looks unless the publisher is another one"
    handle.renew()
    for _ in range(2):
        await handle.start()
    assert len(started) == 1 + moved
