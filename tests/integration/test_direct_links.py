"""Engines on machines of their own (network namespaces): one whose link is cut, or that dies, is lost alone."""

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

pytestmark = pytest.mark.integration
LATE_S = 20
"""Deadline of a step: a bucket takes a second."""


@pytest.fixture
def stand() -> Iterator[Stand]:
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        yield Stand(stack, 1, 2, mbit=200, layers=1, step_deadline_s=LATE_S)


@pytest.mark.parametrize(
    "fail", [lambda stand: stand.hosts[2].cut(), lambda stand: stand.residents[1].process.kill()], ids=["cut", "killed"]
)
def test_an_engine_that_cannot_be_reached_is_lost_alone(stand: Stand, fail: Callable[[Stand], None]) -> None:
    whole = asyncio.run(stand.publish(0))
    assert whole.lost == [] and whole.buckets > 1

    async def publish() -> None:
        publishing = asyncio.create_task(stand.publish(1))
        while stand.delivery.transfer < 2 or not stand.delivery.taking:
            await asyncio.sleep(0.01)
        fail(stand)
        done = await publishing
        assert done.lost == ["e1"]
        assert done.engines["e0"].tensors == done.tensors == whole.tensors
        assert done.engines["e1"].error.code in ("direct.missing", "direct.unreached", "engine.silent", "engine.gone")

    asyncio.run(publish())
    # The next publication goes to the engine that is left, which nothing keeps waiting.
    again = asyncio.run(stand.publish(2))
    assert list(again.engines) == ["e0"] and again.lost == [] and again.seconds["total"] < LATE_S
