"""Engines that hold the base of the policy's adapters get the adapters alone, and all others everything."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import AsyncMock

from slimx.orchestration.publications import EnginePublications
from tests.unit.rollout.rollout_stand import config_of


class Noted:
    """A publisher that notes what it was asked for."""

    def __init__(self, kind: str, run: Published):
        self.kind, self.run = kind, run

    async def publish(self, version: int, *, trainer_step: int) -> SimpleNamespace:
        self.run.sent.append((version, self.kind))
        names = [engine.name for engine in self.run.present]
        return SimpleNamespace(engines=dict.fromkeys(names), lost=[name for name in names if name in self.run.failing])


class Published(EnginePublications):
    """Publications to the engines in `present`; those in `failing` are lost meanwhile."""

    def __init__(self) -> None:
        self.present = [SimpleNamespace(name=name, incarnation=1) for name in ("e0", "e1")]
        self.failing: set[str] = set()
        self.sent: list[tuple[int, str]] = []
        engines = SimpleNamespace(members=SimpleNamespace(candidates=lambda: self.present))
        maker, trainers = AsyncMock(versions={}), SimpleNamespace(plans={})
        super().__init__("actor", config_of(), engines, maker, trainers, "hf", print)
        self.publisher, self.adapters = Noted("all", self), Noted("adapters", self)


async def test_the_base_goes_out_once_and_again_when_an_engine_was_started_again():
    run = Published()
    for version in range(3):
        await run._publish_once(version)
    run.present[1].incarnation += 1
    for version in range(3, 5):
        await run._publish_once(version)
    assert run.sent == [(0, "all"), (1, "adapters"), (2, "adapters"), (3, "all"), (4, "adapters")]


async def test_an_engine_lost_during_publication_gets_the_base_again():
    run = Published()
    run.failing = {"e1"}
    await run._publish_once(0)
    first, lost = run.present
    run.present = [first]
    await run._publish_once(1)
    run.present, run.failing = [first, lost], set()  # as it was: nobody has started it again
    await run._publish_once(2)
    assert run.sent == [(0, "all"), (1, "adapters"), (2, "all")]


async def test_without_adapters_every_publication_sends_all_weights():
    run = Published()
    run.adapters = None
    for version in range(2):
        await run._publish_once(version)
    assert run.sent == [(0, "all"), (1, "all")]
