"""Order, staleness and resumption of groups do not depend on timing: ticket order and admission decide alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.saved.codec import decode, encode
from slimx.errors import DeadlineError
from slimx.rollout import single_turn
from slimx.rollout.flow.tickets import SavedTicket
from slimx.rollout.hooks import Generate, RolloutContext, seed_of
from tests.unit.rollout.rollout_stand import FakeEngine, Stand, config_of, ids_of, one, prompts
from tests.virtual_time import virtually
from tests.waits import until


def tokens_of(groups: Sequence[Group]) -> list[list[int]]:
    return [trajectory.token_ids.tolist() for group in groups for trajectory in group.trajectories]


def stuck(*tickets: int) -> Generate:
    """Returns single_turn, except that the groups of some tickets never come."""

    async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        if int(ctx.group_id[1:]) in tickets:
            await asyncio.sleep(600)
        return await single_turn.generate(ctx, prompt)

    return generate


# Order, staleness, deadlines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_groups_arrive_in_ticket_order_whatever_the_timing(max_staleness):
    def keep(group: Group) -> bool:
        return int(group.id[1:]) % 3 != 1

    config = config_of(schedule__max_staleness=max_staleness)
    runs = []
    for seed in range(6):
        async with Stand(config, reward=one, keep=keep, engine=FakeEngine(0.01, seed)) as stand:
            batches = [await stand.next_batch() for _ in range(4)]
        assert [len(batch.groups) for batch in batches] == [4] * 4
        runs.append((ids_of(batches), [tokens_of(batch.groups) for batch in batches]))
    assert runs[0][0] == [f"g{n}" for n in range(24) if n % 3 != 1][:16]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("seed", range(12))
async def test_no_trajectory_is_older_than_the_bound_when_it_is_trained(max_staleness, seed):
    """Random times of generation, training and publication; a third of the groups dropped."""
    random = np.random.default_rng(seed)

    def keep(group: Group) -> bool:
        return random.random() > 0.3

    config = config_of(schedule__max_staleness=max_staleness)
    ages: Counter[int] = Counter()
    async with Stand(config, keep=keep, engine=FakeEngine(0.008, seed)) as stand:
        for version in range(8):
            await asyncio.sleep(random.uniform(0, 0.004))
            stand.publish(version)
            batch = await stand.next_batch()
            if max_staleness == 0:
                assert stand.manager.in_flight == 0, "a synchronous run generates nothing while it trains"
            await asyncio.sleep(random.uniform(0, 0.008))  # training
            for trajectory in (t for group in batch.groups for t in group.trajectories):
                ages[version - trajectory.oldest_version] += 1
    assert set(ages) == {0} if max_staleness == 0 else set(ages) == {0, 1}, ages


async def test_one_step_off_generates_the_next_batch_meanwhile_and_no_more():
    config = config_of(schedule__max_staleness=1)
    async with Stand(config) as stand:
        for step in range(3):
            await stand.next_batch()
            await until(lambda: stand.manager.in_flight == 0)
            assert len(stand.engine.requests) == 2 * 4 * (step + 2)


@virtually
async def test_requests_in_flight_are_bounded():
    for limit, busiest in ((3, 3), (100, 8)):
        async with Stand(config_of(concurrency=limit), engine=FakeEngine(0.01)) as stand:
            await stand.next_batch()
            assert stand.engine.busiest == busiest


@virtually
async def test_a_batch_that_misses_its_deadline_names_what_it_awaits():
    config = config_of(schedule__step_deadline=0.4)
    async with Stand(config, generate=stuck(1, 2)) as stand:
        with pytest.raises(DeadlineError) as caught:
            await stand.next_batch()
        (waiting,) = [t.prompt.id for t in stand.manager.state()["tickets"] if t.number == 1]
        assert "2 of 4" in caught.value.awaited and waiting in caught.value.awaited
        assert caught.value.holder == "single_turn"


@virtually
async def test_stopping_cancels_what_is_in_flight():
    async with Stand(config_of(), engine=FakeEngine(60)) as stand:
        waiting = asyncio.create_task(stand.next_batch())
        await until(lambda: stand.engine.busy == 8)
        waiting.cancel()
    assert stand.engine.busy == 0


# Seeds and evaluation -------------------------------------------------------------------------------------------------


async def test_a_rollouts_seed_depends_on_run_ticket_and_index_alone():
    async def seeds_of(**options: Any) -> list[int]:
        async with Stand(config_of(**options), engine=FakeEngine(0.005)) as stand:
            groups = [group for _ in range(2) for group in (await stand.next_batch()).groups]
            return [t.sampling["seed"] for group in groups for t in group.trajectories]

    first = await seeds_of()
    assert len(set(first)) == 16 and all(0 <= seed < 2**31 for seed in first)
    assert await seeds_of(concurrency=1) == first
    assert not set(await seeds_of(run__dir="d", run__seed=2)) & set(first)


async def test_an_evaluation_is_greedy_takes_one_rollout_and_is_not_filtered():
    config = config_of(sampling={"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5})
    async with Stand(config, reward=one, keep=lambda group: False) as stand:
        outcome = await stand.maker.make(prompts()[0], group_id="e0", number=0, evaluation=config.eval)
        assert outcome.reason is None and [t.reward for t in outcome.group.trajectories] == [1.0]
        assert [request.sampling for request in stand.engine.requests] == [{"temperature": 0.0, "max_new_tokens": 5}]
        dropped = await stand.maker.make(prompts()[0], group_id="g0", number=0)
        assert dropped.reason == "filter" and len(dropped.group.trajectories) == 2
        trained = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_new_tokens": 5}
        assert [request.sampling for request in stand.engine.requests[1:]] == [trained] * 2


async def test_evaluation_settings_override_samples_and_temperature():
    held_out = {"eval__temperature": 0.6, "eval__top_p": 0.95, "eval__max_new_tokens": 7}
    config = config_of(eval__samples=4, **held_out, sampling={"max_new_tokens": 5})
    async with Stand(config, reward=one) as stand:
        outcome = await stand.maker.make(prompts()[0], group_id="e0", number=0, evaluation=config.eval)
        assert len(outcome.group.trajectories) == 4 and len({request.seed for request in stand.engine.requests}) == 4
        assert [request.sampling for request in stand.engine.requests] == [
            {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7}
        ] * 4


# Resume ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_restored_manager_continues_as_the_uninterrupted_one_would_have(max_staleness):
    config = config_of(schedule__max_staleness=max_staleness)
    async with Stand(config, reward=one) as whole:
        expected = [(await whole.next_batch()).groups for _ in range(5)]

    generate = stuck(9, 11, 14)
    async with Stand(config, generate=generate, reward=one) as stand:
        assert encode((await stand.next_batch()).groups[0].prompt) == encode(expected[0][0].prompt)
        await stand.next_batch()
        await until(lambda: stand.manager.in_flight == 2 * max_staleness)
        state = stand.manager.state()
    # As a checkpoint keeps it: `slimx.orchestration.state.saves`.
    state["tickets"] = decode(list[SavedTicket], encode(state["tickets"]))
    complete = [ticket.number for ticket in state["tickets"] if ticket.group is not None]
    assert [t.number for t in state["tickets"]] == ([8, 9, 10, 11] if max_staleness else [])
    assert complete == ([8, 10] if max_staleness else [])

    async with Stand(config, reward=one) as resumed:
        resumed.manager.restore(state)
        found = [(await resumed.next_batch()).groups for _ in range(3)]
        requested = {request.seed for request in resumed.engine.requests}
    for got, reference in zip(found, expected[2:], strict=True):
        assert [(g.id, g.prompt.id) for g in got] == [(g.id, g.prompt.id) for g in reference]
        assert tokens_of(got) == tokens_of(reference)
        seeds = [[t.sampling["seed"] for g in groups for t in g.trajectories] for groups in (got, reference)]
        assert seeds[0] == seeds[1]
    for group in found[0]:
        again = {seed_of(t.sampling["seed"], 0) for t in group.trajectories} <= requested
        assert again == (int(group.id[1:]) not in complete), f"{group.id}: complete groups are kept, others made again"


async def test_a_state_taken_in_the_middle_of_a_step_loses_no_group():
    config = config_of()
    async with Stand(config, reward=one) as whole:
        expected = [(await whole.next_batch()).groups for _ in range(2)]
    async with Stand(config, generate=stuck(2), reward=one) as stand:
        waiting = asyncio.create_task(stand.next_batch())
        await until(lambda: stand.manager.in_flight == 1)
        state = stand.manager.state()
        waiting.cancel()
    assert [(t.number, t.group is not None) for t in state["tickets"]] == [(0, True), (1, True), (2, False), (3, True)]
    async with Stand(config, reward=one) as resumed:
        resumed.manager.restore(state)
        found = [(await resumed.next_batch()).groups for _ in range(2)]
    assert [tokens_of(groups) for groups in found] == [tokens_of(groups) for groups in expected]
