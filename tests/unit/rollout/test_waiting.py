"""Hundreds of rollouts that wait for tools: what each holds, and that all of them end when they are to end."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Prompt, Trajectory
from slimx.extras.agents import tools
from slimx.extras.agents.toolbox import ToolResult
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.progress import Journal, Recorded
from slimx.rollout.hooks import RolloutContext, RolloutEngine
from slimx.runtime.tasks import cancelled
from tests.extras.agents.proxy_stand import encode, tokenizer
from tests.extras.boxes.calls import calling
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import FakeEngine, Stand, config_of
from tests.virtual_time import run_virtually
from tests.waits import until

COUNT = 200
"""Rollouts that wait."""
TURNS, RESULT = 3, 1000
"""Turns of one before it waits, and tokens of a tool's result."""
BOUND_KB = 100.0
KEY_OF_THREE = "8d3d99def069e58cd6083bd75524cdef"
"""Key in journals of the tokens 7, 1000, 31999: what checkpoints that were written before hold."""


def places(count: int) -> dict[str, Any]:
    """Returns the settings with which `count` rollouts wait at once."""
    return {"prompts_per_step": count // 2, "max_rollouts": count, "concurrency": count, "max_failed_share": 1.0}


class Tools:
    """Rollouts that wait for a tool until they are ended, and when they were."""

    def __init__(self) -> None:
        self.waiting = 0
        self.began: list[float] = []
        self.ended: list[float] = []

    async def wait(self) -> None:
        self.waiting += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.waiting -= 1
            self.ended.append(asyncio.get_running_loop().time())

    async def hook(self, ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        self.began.append(asyncio.get_running_loop().time())
        draft = ctx.draft(prompt)
        for turn in range(TURNS):
            draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=turn))
            draft.add_inserted(range(1000, 1000 + RESULT))  # as large as real ids are: Python shares the small ones
        await self.wait()
        return draft.finish()

    async def toolbox(self, ctx: RolloutContext, prompt: Prompt) -> Any:
        self.began.append(asyncio.get_running_loop().time())
        Box.tools = self
        return await tools.generate(ctx, prompt, toolbox=f"{__name__}.Box", call_deadline=1e6)


class Box:
    """One tool, which does not answer."""

    tools: Tools

    async def open(self, prompt: Prompt, seed: int) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        await self.tools.wait()
        raise AssertionError

    async def judge(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class Calls(FakeEngine):
    """Calls the tool, and keeps no request."""

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(0.25)
        ids = np.array([*encode(calling("wait")), 3], np.int32)
        return Completion(ids, np.full(len(ids), -1.0, np.float32), [(0, len(ids), 0)], "stop", None, 0, 0.01)


def of_a_side(waiting: Tools, side: str, count: int = COUNT, **options: Any) -> Stand:
    engine = Calls()
    return Stand(
        config_of(**places(count), **options), generate=getattr(waiting, side), engine=engine, tokenizer=tokenizer()
    )


async def test_a_rollout_that_waits_holds_little_more_than_its_tokens():
    waiting, count = Tools(), COUNT // 5  # allocations that are traced are slow
    async with of_a_side(waiting, "hook", count) as stand:
        await stand.maker.policies["actor"].client.generate(GenerationRequest([5], {"max_new_tokens": 1}, 1))
        gc.collect()
        tracemalloc.start()
        try:
            batch = asyncio.create_task(stand.next_batch())
            await until(lambda: waiting.waiting == count)
            gc.collect()
            kilobytes = tracemalloc.get_traced_memory()[0] / count / 1000
        finally:
            tracemalloc.stop()
        batch.cancel()
        await asyncio.wait({batch})
    assert kilobytes < BOUND_KB, f"{kilobytes:.0f} kB for each rollout"
    assert waiting.waiting == 0


async def test_a_waiting_request_stores_its_tokens_once_in_four_bytes_each():
    tokens, waiting = 20_000, asyncio.Event()

    class Busy:
        async def generate(self, request: GenerationRequest) -> Completion:
            await waiting.wait()
            raise AssertionError

    engine = RolloutEngine(Busy(), {"max_new_tokens": 1}, 0, False)
    gc.collect()
    tracemalloc.start()
    try:
        requests = [asyncio.create_task(engine.generate(list(range(1000, 1000 + tokens)))) for _ in range(10)]
        await asyncio.sleep(0)
        # Of what threads of earlier tests allocate meanwhile nothing counts.
        places = [tracemalloc.Filter(True, pattern) for pattern in ("*/slimx/rollout/*", __file__)]
        traces = tracemalloc.take_snapshot().filter_traces(places)
        size = sum(trace.size for trace in traces.statistics("filename")) / len(requests) / tokens
    finally:
        tracemalloc.stop()
        await cancelled(*requests)
    assert size < 5, f"{size:.1f} bytes a token"


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda ids: np.array(ids, np.int16), lambda ids: array("q", ids)]
)
def test_requests_are_equal_for_any_sequence_type(make):
    ids = [7, 1000, 31999]
    request = GenerationRequest(make(ids), {"max_new_tokens": 8}, 1)
    assert request == GenerationRequest(ids, {"max_new_tokens": 8}, 1) and list(request.token_ids) == ids
    journal = Journal()
    journal.record(request, Completion(np.array([5], np.int32), np.zeros(1, np.float32), [], "stop", None, 0, 0.0))
    assert [(entry.key, entry.token_ids.tolist()) for entry in journal.entries()] == [(KEY_OF_THREE, ids)]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**70])
def test_a_token_id_beyond_all_vocabularies_is_refused_by_its_number(wrong):
    with refused("request.token_ids", about=f"token id {wrong}"):
        GenerationRequest([5, wrong], {}, 0)


@pytest.mark.parametrize("side", ["hook", "toolbox"])
def test_all_that_wait_are_cancelled_at_once_and_nothing_is_left(side):
    waiting = Tools()

    async def run() -> None:
        before = asyncio.all_tasks()
        async with of_a_side(waiting, side) as stand:
            batch = asyncio.create_task(stand.next_batch())
            await until(lambda: waiting.waiting == COUNT)
            batch.cancel()
            now = asyncio.get_running_loop().time()
            await stand.manager.stop()
        assert len(waiting.ended) == COUNT and set(waiting.ended) == {now}
        assert asyncio.all_tasks() == before
        assert stand.maker.gate.out == 0

    run_virtually(run())


@pytest.mark.parametrize("side", ["hook", "toolbox"])
def test_each_deadline_counts_from_the_start_of_its_rollout(side):
    waiting = Tools()

    async def run() -> None:
        before = asyncio.all_tasks()
        async with of_a_side(waiting, side, rollout_deadline=50.0) as stand:
            groups = []
            for number in range(COUNT // 2):
                made = stand.maker.make(stand.manager.source.next(), group_id=f"g{number}", number=number)
                groups.append(asyncio.create_task(made))
                await asyncio.sleep(0.125)
            outcomes = await asyncio.gather(*groups)
            assert {outcome.reason for outcome in outcomes} == {"generate deadline"}
        assert sorted(waiting.ended) == [began + 50.0 for began in sorted(waiting.began)]
        assert len(waiting.ended) == COUNT and asyncio.all_tasks() == before

    run_virtually(run())


def test_a_journal_restores_requests_and_stores_turns_once():
    journal, tokens, recorded = Journal(), [7] * 500, []
    for turn in range(20):
        request = GenerationRequest(tokens, {"max_new_tokens": 8}, turn)
        ids = np.arange(turn, turn + 8, dtype=np.int32)
        routes = np.zeros((len(tokens) + 7, 1, 1), np.uint8)
        completion = Completion(ids, np.zeros(8, np.float32), [(0, 8, 0)], "stop", routes, 0, 0.0)
        journal.record(request, completion)
        recorded.append((list(tokens), ids))
        tokens = [*tokens, *ids.tolist(), *range(100)]
    other = GenerationRequest(recorded[3][0], {"max_new_tokens": 8}, 99)  # another branch, from the fourth turn on
    journal.record(other, Completion(ids[:2], np.zeros(2, np.float32), [(0, 2, 0)], "stop", None, 0, 0.0))
    recorded.append((recorded[3][0], ids[:2]))
    assert_recorded(journal.entries(), recorded)
    assert [entry.completion.routed_experts is not None for entry in journal.entries()] == [False] * 19 + [True, False]
    assert sum(kept.new.nbytes for kept in journal._entries.values()) < 2 * 4 * len(tokens)
    again = Journal(journal.entries())  # of a checkpoint
    assert_recorded(again.entries(), recorded)
    assert again.replay(other) is not None and again.replay(GenerationRequest([1], {}, 0)) is None


def assert_recorded(entries: list[Recorded], expected: list[tuple[list[int], np.ndarray]]) -> None:
    assert [(entry.token_ids.tolist(), entry.completion.token_ids.tolist()) for entry in entries] == [
        (tokens, came.tolist()) for tokens, came in expected
    ]
