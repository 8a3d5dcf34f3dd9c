"""Engines on machines of their own (network namespaces): links are cut, slow or lose packets, and processes die."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from publish_direct import Stand  # noqa: E402
from publish_hosts import unavailable  # noqa: E402

from slimx.errors import PartLost  # noqa: E402
from slimx.reshard.parties import TransportLost  # noqa: E402
from tests.refusals import numbers, refused  # noqa: E402

pytestmark = pytest.mark.integration
LATE_S = 20
"""Deadline of a step: a bucket takes a second."""


@pytest.fixture
def stand() -> Iterator[Stand]:
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        yield Stand(stack, 1, 2, mbit=200, layers=1, step_deadline_s=LATE_S)


def lost_alone(stand: Stand, fail: Callable[[Stand], None], first: int = 0) -> None:
    """Fails the second engine in the middle of a publication. `first`: version of the one before."""
    whole = asyncio.run(stand.publish(first))
    assert whole.lost == [] and whole.buckets > 1

    async def publish() -> None:
        publishing = asyncio.create_task(stand.publish(first + 1))
        while stand.delivery.transfer < 2 or not stand.delivery.taking:
            await asyncio.sleep(0.01)
        fail(stand)
        done = await publishing
        assert done.lost == ["e1"]
        assert done.engines["e0"].tensors == done.tensors == whole.tensors
        assert done.engines["e1"].error.code in ("direct.missing", "direct.unreached", "engine.silent", "engine.gone")

    asyncio.run(publish())
    # The next publication goes to the engine that is left, which nothing keeps waiting.
    again = asyncio.run(stand.publish(first + 2))
    assert list(again.engines) == ["e0"] and again.lost == [] and again.seconds["total"] < LATE_S


@pytest.mark.slow("test_a_lossy_link_loses_no_engine_and_a_cut_link_loses_one cuts the link")
def test_an_engine_that_is_killed_is_lost_alone(stand: Stand) -> None:
    lost_alone(stand, lambda stand: stand.residents[1].process.kill())


def test_a_lossy_link_loses_no_engine_and_a_cut_link_loses_one(stand: Stand) -> None:
    stand.hosts[2].limit(200, queue_kb=8)
    done = asyncio.run(stand.publish(0))
    assert done.lost == [] and done.engines["e0"].tensors == done.engines["e1"].tensors == done.tensors
    assert stand.hosts[2].dropped() > 10
    stand.hosts[2].limit(200)
    lost_alone(stand, lambda stand: stand.hosts[2].cut(), first=1)


@pytest.mark.slow("waits for a link of 0.5 Mbit/s")
def test_an_engine_behind_a_slow_link_is_lost_alone(stand: Stand) -> None:
    asyncio.run(stand.publish(0))
    stand.hosts[2].limit(0.5)
    done = asyncio.run(stand.publish(1))
    assert done.lost == ["e1"] and done.engines["e0"].tensors == done.tensors
    error = done.engines["e1"].error
    assert (error.code, error.about) == ("direct.missing", "trainer rank 0") and "e1" in str(error)
    assert sum(nbytes > 2**20 for nbytes in numbers(error)) == 2, "the bytes that are missing, and those of the bucket"


@pytest.mark.slow("waits for the deadline of a cut link")
def test_trainer_ranks_with_a_cut_link_cost_no_engine(stand: Stand) -> None:
    asyncio.run(stand.publish(0))
    stand.hosts[0].cut()
    with refused("direct.sender", about="trainer rank 0", kind=TransportLost):
        asyncio.run(stand.publish(1))
    assert stand.members.lost == {}
    stand.hosts[0].mend()
    assert asyncio.run(stand.publish(2)).lost == []
    stand.hosts[0].cut()
    for version in (3, 4):  # first no bytes come, then nobody meets
        with refused("direct.sender", kind=TransportLost) as caught:
            asyncio.run(stand.publish(version))
        assert {"trainer", "rank"} <= set(caught.value.about.split())
    with refused("direct.mute", about=caught.value.about, kind=PartLost):
        asyncio.run(stand.publish(5))
    assert stand.members.lost == {}
