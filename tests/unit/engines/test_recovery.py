"""A lost engine leaves the router at once, comes back in the background, and serves only after a publication."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from slimx.cluster.restarts import Restarts
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import MemberState
from slimx.errors import LOST, DeadlineError, PartLost, SlimxError
from slimx.reshard.parties import ReceiverLost
from tests.refusals import numbers, refused
from tests.unit.engines.recovery_stand import FakeEngine, Stand, gone
from tests.virtual_time import run_virtually


async def test_an_engine_is_in_the_router_only_after_its_admission():
    stand = Stand()
    assert not stand.router.urls and len(stand.members.candidates()) == 2 and not stand.members.members()
    async with stand:
        assert stand.router.urls == {"http://e0/0", "http://e1/0"}
        await stand.members.admit(stand.engines[0])
        assert stand.log.count("add http://e0/0") == 1, "one that stays is not taken out and in again"


async def test_a_lost_engine_leaves_the_router_then_restarts():
    async with Stand() as stand:
        epoch = stand.members.epoch
        await stand.members.quarantine(stand.engines[0], gone())
        assert "http://e0/0" not in stand.router.urls, "gone from the router when the call returns"
        await stand.members.quarantine(stand.engines[0], gone())
        assert stand.members.metrics()["engines/quarantined"] == 1 and stand.members.epoch > epoch
        await stand.until(lambda: stand.engines[0].state is MemberState.JOINING)
        assert stand.log[-3:] == ["remove http://e0/0", "stop http://e0/0", "start e0"]
        assert stand.router.urls == {"http://e1/0"}, "its weights are not published yet"
        assert stand.engines[0] in stand.members.candidates()
        await stand.members.admit(stand.engines[0])
        assert stand.router.urls == {"http://e0/2", "http://e1/0"}
        assert stand.members.metrics() == {
            "engines/serving": 2,
            "engines/quarantined": 0,
            "engines/lost": 1,
            "engines/restarted": 1,
            "engines/router_restarts": 0,
            "engines/outage_seconds": 0,
        }
        out, restart = stand.notes
        assert out.startswith("engine e0 ") and out.endswith(str(gone()).splitlines()[0]), "the log's end is not a line"
        assert restart.startswith("engine e0: ") and numbers(restart) == [1, 2]


async def test_a_lost_engine_is_examined_before_it_is_stopped():
    async with Stand() as stand:

        async def look(error: SlimxError) -> None:
            stand.log.append(f"look {error.code}")

        stand.members.before_ending = look
        await stand.members.quarantine(stand.engines[0], ReceiverLost("e0 is silent", code="engine.silent"))
        await stand.until(lambda: stand.engines[0].state is MemberState.JOINING)
        assert stand.log[-4:] == ["remove http://e0/0", "look engine.silent", "stop http://e0/0", "start e0"]


async def test_an_engine_lost_while_it_is_being_added_is_not_left_in_the_router():
    async with Stand() as stand:
        await stand.members.quarantine(stand.engines[0], gone())
        await stand.until(lambda: stand.engines[0].state is MemberState.JOINING)
        stand.router.slow.clear()
        admission = asyncio.create_task(stand.members.admit(stand.engines[0]))
        await asyncio.sleep(0.01)
        await stand.members.quarantine(stand.engines[0], gone())
        stand.router.slow.set()
        with refused("engine.lost", about="e0", kind=ReceiverLost):
            await admission
        assert stand.router.urls == {"http://e1/0"}


async def test_an_engine_that_returns_before_its_old_server_is_not_a_member():
    async with Stand() as stand:
        first = stand.engines[0]
        await stand.members.quarantine(first, gone())
        await stand.until(lambda: first.state is MemberState.JOINING)
        stand.router.slow.clear()
        admission = asyncio.create_task(stand.members.admit(first))
        await asyncio.sleep(0)
        await stand.members.quarantine(first, gone())
        await stand.until(lambda: first.state is MemberState.JOINING)
        stand.router.slow.set()
        with pytest.raises(ReceiverLost):
            await admission
        assert stand.router.urls == {"http://e1/0"} and first.state is MemberState.JOINING


async def test_restarts_are_counted_per_engine_and_a_failed_start_is_one():
    async with Stand(restarts=3, starts=[SlimxError("no memory"), None, None]) as stand:
        await stand.members.quarantine(stand.engines[0], gone())
        await stand.until(lambda: stand.engines[0].state is MemberState.JOINING)
        assert len(stand.members.restarts["e0"].history) == 2
        await stand.members.quarantine(stand.engines[0], gone())
        await stand.until(lambda: stand.engines[0].state is MemberState.JOINING)
        await stand.members.quarantine(stand.engines[0], gone())
        await stand.until(lambda: stand.engines[0].state is MemberState.GONE)
        assert stand.members.candidates() == [stand.engines[1]] and not stand.members.restarts["e1"].history
        await stand.members.available()


async def test_prefill_and_decode_engines_serve_only_together():
    async with Stand(restarts=0) as stand:
        stand.engines[0].role, stand.engines[1].role = "prefill", "decode"
        starved = asyncio.create_task(stand.members.starved())
        failed = asyncio.create_task(stand.members.failed())
        await asyncio.sleep(0.01)
        assert not starved.done() and not failed.done()
        stand.engines[1].state = MemberState.JOINING  # back, without a version
        stand.members.changed()
        await asyncio.wait_for(starved, 60)
        await stand.members.quarantine(stand.engines[0], gone("e0"))
        with refused("engines.gone", about="e0", kind=PartLost):
            await asyncio.wait_for(failed, 60)


async def test_the_run_ends_when_the_last_engine_is_gone():
    async with Stand(restarts=0) as stand:
        waiting = asyncio.create_task(stand.members.failed())
        await stand.members.quarantine(stand.engines[0], gone("e0"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await stand.members.quarantine(stand.engines[1], gone("e1"))
        for wait in (waiting, stand.members.available(), stand.members.starved()):
            with refused("engines.gone", about="e1", kind=PartLost) as caught:
                await wait
            assert str(gone("e1")) in str(caught.value)


async def test_the_loop_can_wait_for_the_first_engine_to_return():
    async with Stand() as stand:
        starved = asyncio.create_task(stand.members.starved())
        for engine in stand.engines:
            await stand.members.quarantine(engine, gone(engine.name))
        assert not stand.members.candidates()
        await asyncio.wait_for(stand.members.available(), 60)
        await asyncio.wait_for(starved, 60)
        assert stand.members.candidates() and not stand.members.members() and not stand.router.urls


async def test_a_dead_engine_is_found_at_once_a_sick_one_after_three_checks():
    async with Stand() as stand:
        stand.members.watch()
        stand.engines[0].end = "engine e0 ended with status 1"
        await stand.until(lambda: stand.members.lost == 1)
        assert stand.engines[1].state is MemberState.MEMBER
        stand.engines[1].sick = sick = SlimxError("it does not generate")
        checks = 0

        async def check(deadline_s: float) -> None:
            nonlocal checks
            checks += 1
            raise sick

        stand.engines[1].check_health = check
        await stand.until(lambda: stand.members.lost == 2)
        assert checks == 3
        (note,) = [note for note in stand.notes if note.startswith("engine e1 ") and note.endswith(str(sick))]
        assert numbers(note) == [3]


@pytest.mark.parametrize("part", ["engine", "router"])
def test_checks_that_time_out_follow_one_another_without_a_pause(part):
    async def seconds() -> float:
        async with Stand(interval=5, timeout=8) as stand:

            async def silent(deadline_s: float) -> None:
                await asyncio.sleep(deadline_s)
                raise DeadlineError("health", deadline_s, part)

            stand.engines[0].check_health = stand.router.workers = silent
            if part == "engine":
                stand.members.keeper.watch = asyncio.Event().wait
            else:
                stand.engines[0].check_health = stand.engines[1].check_health
            stand.members.watch()
            while not (stand.members.lost if part == "engine" else "restart" in stand.log):
                await asyncio.sleep(0.5)
            return asyncio.get_running_loop().time()

    assert 5 + 3 * 8 <= run_virtually(seconds()) <= 5 + 3 * 8 + 0.5


async def test_a_lost_request_returns_after_dead_engines_have_left():
    async with Stand() as stand:
        stand.engines[1].end = "engine e1 ended with status 1"
        await asyncio.gather(*(stand.members.look() for _ in range(5)))
        assert stand.router.urls == {"http://e0/0"} and stand.members.lost == 1


@pytest.mark.parametrize("how", ["end", "silent"])
async def test_a_lost_router_is_restarted_with_its_members(how):
    async with Stand() as stand:
        stand.members.watch()
        await stand.members.quarantine(stand.engines[1], gone("e1"))
        setattr(stand.router, how, "it ended" if how == "end" else SlimxError("no answer"))
        await stand.until(lambda: stand.members.outage.lasts)
        assert stand.members.awaited()["what"].startswith("the router")
        await stand.until(lambda: not stand.members.outage.lasts)
        assert stand.router.urls == {"http://e0/0"}, "the member alone"
        assert stand.members.failure() is None and stand.members.lost == 1, "no engine is blamed"
        assert [restart.part for restart in stand.restarts if restart.part == "router"] == ["router"]
        assert stand.members.metrics()["engines/router_restarts"] == 1


async def test_an_engine_that_the_router_lost_is_registered_again():
    async with Stand() as stand:
        stand.members.watch()
        stand.router.urls.clear()
        await stand.until(lambda: stand.router.urls == {"http://e0/0", "http://e1/0"})
        assert not stand.restarts


async def test_a_request_lost_with_the_router_returns_after_its_restart():
    async with Stand() as stand:
        stand.members.keeper.in_flight = lambda: "2 requests of groups g1, g2 are sent again"
        stand.router.end = "it ended"
        await asyncio.gather(*(stand.members.look() for _ in range(5)))
        assert stand.router.urls == {"http://e0/0", "http://e1/0"} and stand.log.count("restart") == 1
        assert any("g1, g2" in note for note in stand.notes)


async def test_engine_changes_during_a_router_outage_are_not_blamed():
    async with Stand() as stand:
        first, second = stand.engines
        await stand.members.quarantine(first, gone())
        await stand.until(lambda: first.state is MemberState.JOINING)
        stand.router.end = "it ended"
        await asyncio.gather(stand.members.admit(first), stand.members.quarantine(second, gone("e1")))
        assert stand.router.urls == {first.url} and first.state is MemberState.MEMBER
        assert stand.members.failure() is None


async def test_a_member_that_a_new_router_cannot_add_is_lost():
    async with Stand() as stand:
        add = stand.router.add

        async def refuse(url: str, **about: object) -> None:
            if url == "http://e1/0":
                raise SlimxError("the worker does not answer")
            await add(url, **about)

        stand.router.add, stand.router.end = refuse, "it ended"
        await stand.members.look()
        await stand.until(lambda: stand.members.lost == 1)
        assert stand.router.urls == {"http://e0/0"} and stand.log.count("restart") == 1
        await stand.until(lambda: stand.engines[1].state is MemberState.JOINING)


async def test_a_router_that_does_not_return_ends_the_run():
    async with Stand() as stand:
        stand.router.starts = failures = [SlimxError("the port is taken"), SlimxError("it ended at once")]
        describe_restarts = list(map(str, failures))
        stand.members.watch()
        stand.router.end = "the router ended with status 1"
        with pytest.raises(SlimxError) as caught:
            await asyncio.wait_for(stand.members.failed(), 60)
        assert (caught.value.code, caught.value.about, caught.value.status) == ("router.gone", "router", LOST)
        assert [restart.error for restart in stand.restarts] == describe_restarts
        assert all(restart.error in str(caught.value) for restart in stand.restarts)


async def test_while_no_engine_serves_there_is_an_outage_until_one_is_admitted():
    async with Stand() as stand:
        outage = stand.members.outage
        await stand.members.quarantine(stand.engines[0], gone())
        assert not outage.lasts and stand.members.awaited() is None
        await stand.members.quarantine(stand.engines[1], gone("e1"))
        assert outage.lasts and "e0, e1" in stand.members.awaited()["what"]
        await stand.until(lambda: stand.engines[0].state is MemberState.JOINING)
        assert outage.lasts and stand.members.awaited()["what"].startswith("a publication")
        await stand.members.admit(stand.engines[0])
        assert not outage.lasts and stand.members.metrics()["engines/outage_seconds"] > 0


async def test_a_run_waits_for_an_engine_no_longer_than_the_outages_deadline():
    async with Stand(count=1, outage_deadline=0.1) as stand:
        hold = asyncio.Event()
        stand.engines[0].start = lambda deadline_s: hold.wait()
        await stand.members.quarantine(stand.engines[0], gone())
        with pytest.raises(DeadlineError) as caught:
            await asyncio.wait_for(stand.members.available(), 60)
        assert caught.value.about == "an engine to come back"


async def test_restarts_count_no_more_once_an_engine_has_served_long_enough():
    passed = 0.0
    async with Stand(restarts=1, stable_after=60) as stand:
        first = stand.engines[0]
        stand.members.restarts[first.name]._clock = lambda: time.monotonic() + passed
        for _ in range(4):
            passed += 60
            await stand.members.quarantine(first, gone())
            await stand.until(lambda: first.state is MemberState.JOINING)
            await stand.members.admit(first)
        assert len(stand.members.history()) == 4
        await stand.members.quarantine(first, gone())  # soon after its restart
        await stand.until(lambda: first.state is MemberState.GONE)


async def test_reasons_of_all_restarts_are_listed_at_the_end():
    async with Stand(restarts=2, starts=[SlimxError("no memory"), SlimxError("no port")], count=1) as stand:
        await stand.members.quarantine(stand.engines[0], gone())
        with pytest.raises(SlimxError) as caught:
            await asyncio.wait_for(stand.members.failed(), 60)
        assert (caught.value.code, caught.value.about) == ("engines.gone", "e0")
        assert [(restart.part, restart.reason, restart.error) for restart in stand.restarts] == [
            ("engine e0", str(gone()).splitlines()[0], "no memory"),
            ("engine e0", "no memory", "no port"),
        ]
        assert stand.restarts == stand.members.history()
        assert all(restart.error in str(caught.value) for restart in stand.restarts)


async def test_pauses_between_restarts_grow():
    notes: list[str] = []
    restarts = Restarts("part", Health(restarts=9), note=notes.append)
    pauses = []
    while restarts.left:
        pauses.append(restarts.pause)
        with suppress(SlimxError), restarts.attempt(SlimxError("lost")):
            raise SlimxError("again")
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30] and len(restarts.history) == 9


# Engines that answer health checks and fail requests ------------------------------------------------------------------


async def test_an_engine_that_fails_requests_is_found_by_a_lost_request():
    async with Stand() as stand:
        probes: list[str] = []

        async def probe(engine: FakeEngine) -> None:
            probes.append(engine.name)
            if engine.name == "e1":
                raise SlimxError("POST http://e1/generate answered 500: broken")

        stand.members.probe = probe
        await asyncio.gather(*(stand.members.look() for _ in range(5)))
        assert stand.router.urls == {"http://e0/0"} and stand.members.lost == 1
        assert sorted(probes) == ["e0", "e1", "e1"], "one look, and a second try for the suspect"
        await stand.until(lambda: stand.engines[1].state is MemberState.JOINING)
        assert "answered 500: broken" in stand.restarts[0].reason


async def test_an_engine_that_ends_while_its_requests_fail_is_lost_by_its_end():
    """A server breaks connections for a second after its scheduler's death, and ends only then."""
    async with Stand() as stand:

        async def probe(engine: FakeEngine) -> None:
            if engine.name == "e1":
                engine.end = "engine e1 ended with status 137"
                raise SlimxError("POST http://e1/generate was not answered")

        stand.members.probe = probe
        await stand.members.look()
        assert stand.router.urls == {"http://e0/0"} and stand.members.lost == 1
        await stand.until(lambda: stand.engines[1].state is MemberState.JOINING)
        assert numbers(stand.restarts[0].reason) == [137]


async def test_a_paused_engine_is_not_probed_and_probes_have_deadlines():
    async with Stand(timeout=0.05) as stand:

        async def probe(engine: FakeEngine) -> None:
            await asyncio.sleep(5)

        stand.members.probe = probe
        stand.engines[0].ready = False
        await asyncio.wait_for(stand.members.look(), 60)
        assert stand.router.urls == {"http://e0/0"}, "the one that is paused stays"


async def test_a_mistake_of_ours_in_the_background_reaches_the_loop():
    async with Stand() as stand:

        async def broken(deadline_s: float) -> None:
            raise TypeError("a mistake")

        stand.engines[0].start = broken
        await stand.members.quarantine(stand.engines[0], gone())
        with refused("engines.mistake", about="TypeError"):
            await asyncio.wait_for(stand.members.failed(), 60)
