"""Transport "nixl" in a run: its delivery calls the trainers' role, and receivers are as many as engines need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.engines.transport import MemoryDelivery, transport_of
from slimx.extras.direct.delivery import DirectDelivery, RankSenders
from slimx.extras.direct.ends.engine_end import DirectEnd
from slimx.extras.direct.ends.offer import Offer, PackedRun
from slimx.extras.direct.source import DirectSource
from slimx.reshard.pack.pieces import PlannedBuckets
from tests.unit.reshard.gather_stand import WORLD, plan


class Trainers:
    """Trainer ranks that note the calls of their operations."""

    def __init__(self) -> None:
        self.actors = [object()] * WORLD
        self.plans = {"publish": PlannedBuckets(plan())}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def stored(self, values: list[Any]) -> list[Any]:
        return [("stored", value) for value in values]

    async def call(self, method: str, what: str, /, **arguments: Any) -> list[Any]:
        self.calls.append((method, arguments))
        return [rank for rank in range(WORLD)]


def config_of(**publish: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "run"},
            "model": {"path": "model"},
            "rollout": {"prompts": "none"},
            "publish": {"transport": "nixl"} | publish,
        }
    )


@pytest.mark.parametrize(
    ("publish", "device", "colocate", "on_gpus"),
    [
        ({"staging": "bucket"}, "cuda", False, True),
        ({"staging": "bucket"}, "cuda", True, True),
        ({"staging": "bucket"}, "cpu", False, False),
        ({"staging": "model"}, "cuda", False, False),
        ({"staging": "bucket", "delta": {"every_full": 2}}, "cuda", False, False),
    ],
)
def test_bytes_travel_from_gpus_where_nothing_needs_them_on_the_host(
    publish: dict[str, Any], device: str, colocate: bool, on_gpus: bool
) -> None:
    section = config_of(**publish).publish
    assert transport_of(section).on_gpus(section, device, colocate=colocate) == on_gpus


def test_a_run_publishes_to_a_receiver_of_each_machine_or_gpu() -> None:
    several = [SimpleNamespace(name="wide", nodes=2), SimpleNamespace(name="narrow", nodes=1)]
    for device, count in (("cpu", 3), ("cuda", 2 * plan().targets)):
        config, trainers = config_of(staging="bucket"), Trainers()
        transport, engines = transport_of(config.publish), SimpleNamespace(receivers=several, device=device)
        source, delivery = transport.connect(config, trainers, engines, None)
        assert isinstance(source, DirectSource) and isinstance(delivery, DirectDelivery)
        assert len(delivery.edges) - 1 == count and delivery.on_gpus == (device == "cuda")
        assert not transport.gathers and transport.end(config.publish) is DirectEnd


def test_a_run_without_engines_publishes_from_memory() -> None:
    config, source = config_of(), object()
    found, delivery = transport_of(config.publish).connect(config, Trainers(), None, source)
    assert found is source and type(delivery) is MemoryDelivery


async def test_trainer_ranks_get_the_plan_and_their_part_of_an_offer() -> None:
    trainers = Trainers()
    senders = RankSenders(trainers)
    await senders.prepare(senders.published, [0, 1], 2, False)
    (method, arguments) = trainers.calls.pop()
    assert method == "direct.prepare"
    assert arguments["plan"] == ("stored", plan().to_bytes())
    assert (arguments["edges"], arguments["item"], arguments["on_gpu"]) == ([0, 1], 2, False)
    offer = Offer("e0", b"", (), tuple(PackedRun(0, rank, 0, 0, 0) for rank in range(WORLD)))
    await senders.connect(3, offer)
    (method, arguments) = trainers.calls.pop()
    assert method == "direct.connect" and arguments["engine"] == 3
    runs = [Offer.from_bytes(data).runs for (data,) in arguments["per_rank"]]
    assert [[run.source for run in of_rank] for of_rank in runs] == [[rank] for rank in range(WORLD)]
    assert await senders.send(1, 5, {0: 0}) == list(range(WORLD))
    assert trainers.calls == [("direct.send", {"bucket": 1, "transfer": 5, "engines": {0: 0}})]
