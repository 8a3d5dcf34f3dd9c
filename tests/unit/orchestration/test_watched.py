"""Work that needs engines goes on when they come back, and ends when none can."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from slimx.engines.fleet.handle import MemberState
from slimx.errors import PartLost, SlimxError
from slimx.orchestration.publications import EnginePublications, Publications
from tests.refusals import refused
from tests.unit.engines.recovery_stand import Stand, gone
from tests.unit.rollout.rollout_stand import config_of

STEP = 7


class Watched(EnginePublications):
    """Publications that admit every engine that waits for one."""

    def __init__(self, stand: Stand, keeps: bool = False, stored: bool = True):
        engines, maker = SimpleNamespace(members=stand.members), AsyncMock(versions={})
        trainers = SimpleNamespace(plans={})
        super().__init__("actor", config_of(), engines, maker, trainers, "hf", stand.notes.append)
        self.delivery.keeps = keeps
        self.stand, self.stored = stand, stored
        self.published: list[str] = []

    async def publish(self, step: int) -> None:
        assert step == STEP
        await self._admit("by the trainers")

    async def catch_up(self) -> bool:
        if self.stored:
            await self._admit("from disk")
        return self.stored

    async def _admit(self, how: str) -> None:
        self.published.append(how)
        for engine in self.stand.members.joining():
            await self.stand.members.admit(engine)

    def until_served(self, url: str) -> asyncio.Task[str]:
        """Starts work that ends when a server is in the router."""

        async def work() -> str:
            await self.stand.until(lambda: url in self.stand.router.urls)
            return "done"

        return asyncio.create_task(work())


async def lose(stand: Stand, *numbers: int) -> None:
    for number in numbers:
        await stand.members.quarantine(stand.engines[number], gone(f"e{number}"))


async def test_the_first_engine_back_gets_the_current_version():
    async with Stand() as stand:
        run = Watched(stand)
        work = run.until_served("http://e0/2")  # lost first, so back first; the other one may have to wait
        await lose(stand, 0, 1)
        assert await run.watched(work, STEP) == "done" and run.published[0] == "by the trainers"


async def test_nothing_is_published_while_an_engine_serves_or_trainers_train():
    async with Stand() as stand:
        run = Watched(stand)

        async def back() -> str:
            await stand.until(lambda: stand.members.joining() != [])
            await asyncio.sleep(0.02)
            return "done"

        await lose(stand, 0)
        assert await run.watched(back(), STEP) == "done"
        await lose(stand, 0, 1)
        assert await run.watched(back(), STEP, training=True) == "done"
        assert run.published == []


@pytest.mark.parametrize("training", [False, True])
async def test_a_version_that_is_kept_reaches_any_engine_that_is_back_at_once(training):
    async with Stand() as stand:
        run = Watched(stand, keeps=True)
        work = run.until_served("http://e0/2")
        await lose(stand, 0)
        assert await run.watched(work, STEP, training=training) == "done"
        assert run.published == ["from disk"]


async def test_trainers_publish_a_version_that_was_not_kept():
    async with Stand() as stand:
        run = Watched(stand, keeps=True, stored=False)
        work = run.until_served("http://e0/2")
        await lose(stand, 0, 1)
        assert await run.watched(work, STEP) == "done" and set(run.published) == {"by the trainers"}


@pytest.mark.parametrize("fails", [False, True])
async def test_losing_the_last_engine_ends_the_work_with_that_error(fails):
    async with Stand(restarts=0) as stand:
        run, ended = Watched(stand), asyncio.Event()

        async def work() -> None:
            try:
                await stand.until(lambda: stand.engines[1].state is MemberState.GONE and fails)
                raise SlimxError("a request found no engine")
            finally:
                ended.set()

        watched = asyncio.create_task(run.watched(work(), STEP))
        await asyncio.sleep(0)
        await lose(stand, 0, 1)
        with refused("engines.gone", kind=PartLost):
            await asyncio.wait_for(watched, 60)
        assert ended.is_set()


async def test_engines_of_several_policies_are_watched_by_their_owner_alone():
    async with Stand() as stand:
        run = Watched(stand)
        run.policy, run._shared = "judge", SimpleNamespace(owner="actor")
        await lose(stand, 0, 1)

        async def work() -> str:
            await stand.until(lambda: stand.members.joining() != [])
            await asyncio.sleep(0.02)
            return "done"

        assert await run.watched(work(), STEP) == "done" and run.published == []


async def test_errors_are_raised_and_a_run_without_engines_waits():
    async def work(fail: bool) -> int:
        await asyncio.sleep(0.01)
        if fail:
            raise SlimxError("a mistake in the hook", code="test.mistake", about="hook")
        return 3

    async with Stand() as stand:
        run = Watched(stand)
        assert await run.watched(work(False), STEP) == 3
        with refused("test.mistake", about="hook"):
            await run.watched(work(True), STEP)
        assert await Publications().watched(work(False), STEP) == 3
