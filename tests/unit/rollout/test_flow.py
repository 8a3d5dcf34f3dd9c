"""Whatever the timing, the failures, the filter, the schedule and the moment of a kill: no trajectory is too old, no
prompt is lost, none is trained twice; and in strict order the groups are those of a synchronous run."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimx.config.schema import Config
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Group, Prompt, Trajectory
from slimx.errors import DeadlineError
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest, Pending
from slimx.rollout.flow.progress import key_of
from slimx.rollout.flow.tickets import Dropped
from slimx.rollout.hooks import seed_of
from tests.refusals import numbers, refused
from tests.unit.rollout.flow_stand import TURN_TOKENS, Flow, kept, token_of
from tests.unit.rollout.rollout_stand import config_of
from tests.virtual_time import run_virtually

STEPS, SIZE = 7, 4
PROMPTS = [Prompt(id=f"p{n}", token_ids=[5, 6, 7]) for n in range(23)]


def expected_tokens(trajectory: Trajectory) -> list[int]:
    """Returns the tokens that an uninterrupted run samples."""
    prompt, seed = trajectory.spans[0].stop, trajectory.sampling["seed"]
    first = [token_of(seed_of(seed, 0), prompt + n) for n in range(TURN_TOKENS)]
    start = prompt + TURN_TOKENS + 2
    return first + [token_of(seed_of(seed, 1), start + n) for n in range(TURN_TOKENS)]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    staleness = draw(st.integers(0, 4))
    window = draw(st.integers(0, staleness))
    over_sampling = draw(st.sampled_from([None, 1.0, 1.3, 1.5, 2.0, 3.0]))
    if window and (over_sampling or staleness + 1 - window) <= 1:
        over_sampling = 1.5
    several = (over_sampling or max(1, staleness + 1 - window)) > 1
    return config_of(
        prompts_per_step=SIZE,
        over_sampling=over_sampling,
        partial=draw(st.booleans()) if staleness else False,
        concurrency=draw(st.sampled_from([3, 1000])),
        max_failed_share=1.0,
        sampling={"max_new_tokens": TURN_TOKENS},
        schedule__max_staleness=staleness,
        schedule__window=window,
        schedule__straggler_deadline=draw(st.sampled_from([None, 2.0, 15.0])) if several else None,
    )


class Driver:
    """A run of `STEPS` steps with random durations. With `kills` it ends at random moments and goes on from its last
    checkpoint, also written at random moments; what was trained after that is forgotten with it."""

    def __init__(self, config: Config, seed: int, kills: bool) -> None:
        self.config, self.kills, self.random = config, kills, np.random.default_rng(seed)
        self.flow = Flow(config, self.random, PROMPTS)
        self.batches: list[list[Group]] = []
        self.current = 0
        """Step in progress."""
        self.lines: list[tuple[int, Dropped]] = []
        """dropped.jsonl: the step that counts each group, and the group."""
        self.regenerated = 0
        self.follow()
        self.checkpoint = self.flow.saved(), 0

    @property
    def dropped(self) -> dict[int, str]:
        found = {int(dropped.group[1:]): dropped.reason for _, dropped in self.lines}
        assert len(found) == len(self.lines), "a group is dropped once"
        return found

    @property
    def stragglers(self) -> set[int]:
        """Stragglers."""
        return {number for number, reason in self.dropped.items() if reason == "straggler"}

    def follow(self) -> None:
        """Writes down what the present process drops, as a run does."""
        manager = self.flow.manager

        def drop(dropped: Dropped) -> None:
            self.flow.dropped.append(dropped)
            self.lines.append((manager.counting(self.current, len(self.batches)), dropped))

        manager.on_drop = drop

    async def run(self) -> None:
        while len(self.batches) < STEPS:
            self.flow.publish(len(self.batches))
            if self.kills and self.random.random() < 0.3:
                await self.be_killed()
                continue
            self.current = len(self.batches) + 1
            watch = asyncio.create_task(self.watch())
            batch = await self.flow.manager.next_batch()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            self.regenerated += batch.regenerated
            self.check(batch.groups)
            counted = Counter(dropped.reason for step, dropped in self.lines if step == self.current)
            assert counted == batch.dropped, "a step's metrics count the lines that bear its number"
            self.batches.append(batch.groups)
            await asyncio.sleep(self.random.uniform(0, 12))  # training
            self.check_nothing_lost()
            if self.random.random() < 0.5:
                self.save()
        await self.flow.manager.stop()

    async def watch(self) -> None:
        """Checks that a batch for which enough groups are done comes in time."""
        loop, since, limit = asyncio.get_running_loop(), None, self.config.schedule.straggler_deadline
        while limit is not None:
            await asyncio.sleep(0.25)
            outcomes = [ticket.outcome for ticket in self.flow.manager.tickets]
            done = sum(outcome is not None and outcome.reason is None for outcome in outcomes)
            if done < SIZE:
                since = None
            elif since is None:
                since = loop.time()
            assert since is None or self.flow.manager.waiting_since is None or loop.time() <= since + limit + 0.5

    def save(self) -> None:
        self.checkpoint = self.flow.saved(), len(self.batches)

    async def be_killed(self) -> None:
        """Ends the flow while a batch is waited for, half of the time after a last checkpoint; resumes in another."""
        self.current = len(self.batches) + 1
        waiting = asyncio.ensure_future(self.flow.manager.next_batch())
        await asyncio.wait({waiting}, timeout=self.random.uniform(0, 20))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if waiting.cancelled() and self.random.random() < 0.5:
            await self.flow.manager.rest()
            assert self.flow.engine.out == 0
            self.save()
        await self.flow.manager.stop()
        state, steps = self.checkpoint
        self.batches, self.current = self.batches[:steps], 0
        self.lines = [line for line in self.lines if line[0] <= steps]  # as a resumed run opens the file
        self.flow = Flow(self.config, self.random, PROMPTS)
        self.follow()
        self.flow.publish(steps)
        self.flow.manager.restore(state)

    def check(self, groups: list[Group]) -> None:
        """Checks a batch, at the moment when it is trained."""
        version, config = len(self.batches), self.config
        assert len(groups) == SIZE
        for trajectory in (t for group in groups for t in group.trajectories):
            assert 0 <= version - trajectory.oldest_version <= config.schedule.max_staleness
            versions = trajectory.versions()[trajectory.versions() >= 0].tolist()
            assert versions == sorted(versions), "later tokens come from later versions"
            assert trajectory.sampled_ids().tolist() == expected_tokens(trajectory)
        if self.flow.manager.rests:
            assert self.flow.engine.out == 0, "engines rest while trainers train"
        assert not any(outcome.reason == "too old" for outcome in self.flow.dropped)

    def check_nothing_lost(self) -> None:
        """Checks that every admitted prompt was trained, was dropped, or is on its way: one of the three, once."""
        trained = [int(group.id[1:]) for groups in self.batches for group in groups]
        coming = [ticket.number for ticket in self.flow.manager.tickets]
        state = self.flow.manager.state()
        assert sorted([*trained, *self.dropped, *coming]) == list(range(state["next"]))
        source = PromptSource(PROMPTS, 1)
        order = [source.next().id for _ in range(state["next"])]
        assert source.state() == state["source"]
        groups = [group for groups in self.batches for group in groups]
        assert all(group.prompt.id == order[int(group.id[1:])] for group in groups)


RUNS = configs(), st.integers(0, 2**32), st.booleans()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(*RUNS)
def test_no_trajectory_is_too_old_and_no_prompt_is_lost_or_repeated(config, seed, kills):
    check_run(config, seed, kills)


@pytest.mark.slow("500 random runs")
@settings(max_examples=500, deadline=None, derandomize=True)
@given(*RUNS)
def test_so_it_is_in_hundreds_of_runs(config, seed, kills):
    check_run(config, seed, kills)


def check_run(config: Config, seed: int, kills: bool) -> None:
    driver = Driver(config, seed, kills)
    run_virtually(driver.run())
    trained = [int(group.id[1:]) for groups in driver.batches for group in groups]
    window = config.schedule.window
    if window == 0:
        # In strict order the schedule does not matter: these are the groups of a synchronous run.
        order = (n for n in itertools.count() if kept(config, n) and n not in driver.stragglers)
        assert trained == list(itertools.islice(order, STEPS * SIZE))
    assert config.schedule.straggler_deadline is not None or not driver.stragglers
    assert len(set(trained)) == len(trained)
    for place, number in enumerate(trained):
        older_later = [later for later in trained[place + 1 :] if later < number]
        assert all(number - later <= window * SIZE for later in older_later)
    surplus = (config.rollout.over_sampling or 1) > config.schedule.max_staleness + 1
    assert surplus or driver.regenerated == 0, "within the bound nothing is generated in vain"


# Interruptions --------------------------------------------------------------------------------------------------------


def one_step(**options: object) -> Config:
    return config_of(prompts_per_step=SIZE, max_failed_share=1.0, sampling={"max_new_tokens": TURN_TOKENS}, **options)


def test_a_run_that_leaves_in_the_middle_of_a_step_samples_no_token_twice():
    config = one_step()
    sampled: Counter[tuple[int, int]] = Counter()

    async def interrupted(seconds: float) -> int:
        """Leaves after `seconds` and goes on; returns tokens that were there at that moment."""
        first = Flow(config, np.random.default_rng(1), PROMPTS)
        waiting = asyncio.ensure_future(first.manager.next_batch())
        await asyncio.wait({waiting}, timeout=seconds)
        waiting.cancel()
        await first.manager.rest()
        state = first.saved()
        await first.manager.stop()
        second = Flow(config, np.random.default_rng(2), PROMPTS)
        second.manager.restore(state)
        groups = (await second.manager.next_batch()).groups
        assert all(t.sampled_ids().tolist() == expected_tokens(t) for g in groups for t in g.trajectories)
        sampled.clear()
        sampled.update(first.engine.sampled)
        sampled.update(second.engine.sampled)
        return sum(first.engine.sampled.values())

    moments = [run_virtually(interrupted(seconds)) for seconds in (0.5, 2, 4, 6, 9)]
    assert moments == sorted(set(moments)), "the moments are different ones"
    for seconds in (0.5, 2, 4, 6, 9):
        run_virtually(interrupted(seconds))
        assert set(sampled.values()) == {1}


def test_a_restored_group_is_as_old_as_what_was_sampled_of_it():
    config = one_step(partial=True, schedule__max_staleness=2)

    async def work() -> None:
        first = Flow(config, np.random.default_rng(1), PROMPTS)
        first.publish(3)
        waiting = asyncio.ensure_future(first.manager.next_batch())
        while not any(ticket.progress.begun for ticket in first.manager.tickets):
            await asyncio.sleep(0.01)
            await first.manager.rest()
            first.maker.gate.open()
        waiting.cancel()
        await first.manager.rest()
        state = first.saved()
        await first.manager.stop()
        second = Flow(config, np.random.default_rng(2), PROMPTS)
        second.publish(4)
        second.manager.restore(state)
        second.manager.admit()
        born = {ticket.oldest_version for ticket in second.manager.tickets if ticket.progress.begun}
        anew = {ticket.oldest_version for ticket in second.manager.tickets if not ticket.progress.begun}
        assert born == {3} and anew <= {4}
        await second.manager.stop()

    run_virtually(work())


def test_evaluations_run_while_rollouts_are_interrupted():
    config = one_step(concurrency=2, max_rollouts=8, partial=True, schedule__max_staleness=2, rollout_deadline=200)

    async def work() -> None:
        flow = Flow(config, np.random.default_rng(1), PROMPTS)
        await flow.manager.next_batch()
        assert flow.manager.in_flight and flow.engine.out == 0
        outcome = await flow.maker.make(PROMPTS[0], group_id="eval0", number=1 << 30, evaluation=config.eval)
        assert not outcome.failed
        await asyncio.sleep(10 * config.rollout.rollout_deadline)
        batch = await flow.manager.next_batch()
        assert "generate deadline" not in batch.dropped, "the time between two steps is not a rollout's fault"
        await flow.manager.stop()

    run_virtually(work())


@pytest.mark.parametrize("patience", [None, 100.0])
def test_a_straggler_is_dropped_and_the_next_group_is_trained(patience):
    """The second group's first request is never answered; enough others are done after some 30 s."""
    config = one_step(over_sampling=2, schedule__straggler_deadline=patience, schedule__step_deadline=500)

    async def work() -> None:
        flow = Flow(config, np.random.default_rng(1), PROMPTS)
        flow.engine.never = seed_of(seed_of(config.run.seed, 1, 0), 0)
        if patience is None:
            with pytest.raises(DeadlineError) as caught:
                await flow.manager.next_batch()
            assert numbers(caught.value.awaited)[:2] == [1, SIZE], "groups that are not done, and all of the step"
            await flow.manager.stop()
            return
        waiting = asyncio.ensure_future(flow.manager.next_batch())
        await asyncio.sleep(90)
        oldest = flow.manager.status()["oldest"]
        assert {key: oldest[key] for key in ("group", "done", "rollouts")} == {"group": "g1", "done": 1, "rollouts": 2}
        batch = await waiting
        assert 100 < asyncio.get_running_loop().time() < 150
        order = [f"g{number}" for number in range(3 * SIZE) if number != 1 and kept(config, number)]
        assert [group.id for group in batch.groups] == order[:SIZE]
        (straggler,) = [outcome for outcome in flow.dropped if outcome.reason == "straggler"]
        assert straggler.group == "g1" and batch.dropped["straggler"] == 1
        assert numbers(straggler.detail)[:2] == [1, 2] and "schedule.straggler_deadline=100 " in straggler.detail
        assert flow.engine.out == 0, "its request is ended"
        await flow.manager.stop()

    run_virtually(work())


def test_an_unrequested_abort_fails_the_rollout():
    async def work() -> None:
        flow = Flow(one_step(), np.random.default_rng(1), PROMPTS)
        asyncio.get_running_loop().call_later(2, lambda: asyncio.ensure_future(flow.engine.abort()))
        batch = await flow.manager.next_batch()
        assert batch.dropped["generate failed"] and any("abort" in (o.detail or "") for o in flow.dropped)
        await flow.manager.stop()

    run_virtually(work())


def test_engines_that_bring_nothing_back_are_not_waited_for_for_ever():
    async def work() -> None:
        flow = Flow(one_step(partial=True, schedule__max_staleness=1), np.random.default_rng(1), PROMPTS)
        flow.manager.abort = asyncio.Event().wait
        loop = asyncio.get_running_loop()
        await flow.manager.next_batch()
        flow.engine.slowest = 1e4
        waiting = asyncio.ensure_future(flow.manager.next_batch())
        await asyncio.wait({waiting}, timeout=30)
        waiting.cancel()
        began = loop.time()
        await flow.manager.rest()
        limit = flow.manager.config.rollout.interrupt_deadline
        assert limit <= loop.time() - began < limit + 1 and flow.engine.out == 0
        flow.engine.slowest = 1.0
        batch = await flow.manager.next_batch()
        assert all(t.sampled_ids().tolist() == expected_tokens(t) for g in batch.groups for t in g.trajectories)
        await flow.manager.stop()

    run_virtually(work())


def test_interrupted_requests_continue_within_their_limits():
    part = Completion(np.array([8, 9], np.int32), np.zeros(2, np.float32), [(0, 2, 4)], "abort", None, 0, 0.0)
    pending = Pending(GenerationRequest([5, 6], {"max_new_tokens": 5, "min_new_tokens": 1}, 3, affinity="g0"))
    assert pending.received is None and pending.rest() is pending.request
    pending.add(part)
    limits = {"max_new_tokens": 3, "min_new_tokens": 0}
    assert pending.rest() == GenerationRequest([5, 6, 8, 9], limits, 3, affinity="g0")
    pending.add(replace(part, versions=[(0, 1, 4), (1, 2, 6)]))
    assert pending.received.versions == [(0, 3, 4), (3, 4, 6)] and not pending.done
    pending.add(replace(part, token_ids=np.array([7], np.int32), logprobs=np.zeros(1), versions=[(0, 1, 6)]))
    assert pending.done and pending.received.finish_reason == "length", "cut off after the last possible token"
    stopping = Pending(GenerationRequest([5, 6], {"max_new_tokens": 5, "stop": ["</s>"]}, 3))
    stopping.add(part)
    assert stopping.received is None, "to be sampled anew"
    stopping.add(replace(part, finish_reason=""))
    with refused("request.stop_string", about="stop"):  # it was shown already
        stopping.rest()


def test_a_saved_request_is_found_by_its_content():
    request = GenerationRequest([5, 6, 7], {"temperature": 0.8, "max_new_tokens": 12, "stop_token_ids": [3]}, 41)
    assert key_of(request) == "a687d8d52aa7e95be3d308b008b04b08", "checkpoints hold it"
    assert key_of(replace(request, affinity="g0", routed_experts=True)) == key_of(request)
    assert key_of(replace(request, seed=42)) != key_of(request)


# Tokens of older versions ---------------------------------------------------------------------------------------------
