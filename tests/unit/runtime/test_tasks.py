"""Tasks that end together: all or none of them, and the first of several."""

from __future__ import annotations

import asyncio

import pytest

from slimx.runtime.tasks import all_or_none, first_of, race


class Work:
    """Work that ends when it is let go, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def __call__(self) -> int:
        try:
            return await self.result
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_results_of_all_come_in_their_order() -> None:
    one, two = Work(), Work()
    waiting = asyncio.ensure_future(all_or_none([one(), two()]))
    two.result.set_result(2)
    await asyncio.sleep(0)
    one.result.set_result(1)
    assert await waiting == [1, 2] and not (one.cancelled or two.cancelled)


async def test_the_first_failure_cancels_the_rest() -> None:
    one, two = Work(), Work()
    waiting = asyncio.ensure_future(all_or_none([one(), two()]))
    await asyncio.sleep(0)
    two.result.set_exception(KeyError("two"))
    with pytest.raises(KeyError):
        await waiting
    await asyncio.sleep(0)
    assert one.cancelled


async def test_an_error_at_its_cancellation_does_not_win_a_race() -> None:
    async def breaks() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise KeyError("cleaning up")

    two = Work()
    racing = asyncio.ensure_future(race(breaks(), two()))
    await asyncio.sleep(0.01)
    two.result.set_result(2)
    lost, ended = await racing
    assert lost is None and ended is not None and ended.result() == 2


async def test_a_race_cancels_those_that_have_not_ended_and_says_which() -> None:
    one, two, three = Work(), Work(), Work()
    racing = asyncio.ensure_future(race(one(), two(), three()))
    await asyncio.sleep(0)
    two.result.set_result(2)
    ended = await racing
    assert ended[0] is ended[2] is None and ended[1].result() == 2
    assert one.cancelled and three.cancelled


async def test_a_race_that_is_cancelled_cancels_all() -> None:
    one, two = Work(), Work()
    racing = asyncio.ensure_future(race(one(), two()))
    await asyncio.sleep(0.01)
    racing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing
    assert one.cancelled and two.cancelled


@pytest.mark.parametrize("fails", [False, True])
async def test_the_first_of_several_is_the_result_or_the_failure(fails: bool) -> None:
    one, two = Work(), Work()
    waiting = asyncio.ensure_future(first_of([one(), two()]))
    await asyncio.sleep(0)
    if fails:
        two.result.set_exception(KeyError("two"))
        with pytest.raises(KeyError):
            await waiting
    else:
        two.result.set_result(2)
        assert await waiting == 2
    assert one.cancelled
