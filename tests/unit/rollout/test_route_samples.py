"""Tokens' experts are asked for where something uses them, and decoded while other work goes on."""

from __future__ import annotations

import asyncio
import base64
import threading

import numpy as np
import pytest

from slimx.extras.slime.arguments import RunFacts
from slimx.rollout.client import reader as reading
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.reader import Reader
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import Stand, config_of, one

R3 = {"trainer__moe": {"routing_replay": "R3"}}
SAVED = {"track__rollouts": {"routes": True}}


@pytest.mark.parametrize(
    ("options", "stride"),
    [
        ({}, 2),
        ({"prompts_per_step": 32, "group_size": 8}, 64),
        ({"prompts_per_step": 1, "group_size": 3}, 1),
        (R3, 1),
        (SAVED, 1),
        ({"routed_experts": False}, 0),
        ({"routed_experts": False} | SAVED, 0),
    ],
)
def test_the_route_stride_is_derived_from_the_configuration(options, stride):
    assert config_of(**options).route_stride == stride


@pytest.mark.parametrize(("options", "share"), [({}, 1 / 2), (R3, 1), ({"routed_experts": False}, 0)])
async def test_rollouts_ask_for_experts_as_often_as_they_are_used(options, share):
    async with Stand(config_of(**options), reward=one) as stand:
        for _ in range(3):
            await stand.next_batch()
    flags = [request.routed_experts for request in stand.engine.requests]
    assert len(flags) >= 24 and sum(flags) == pytest.approx(share * len(flags), abs=1)


def test_slime_hooks_get_experts_of_every_answer_or_none():
    flag = "use_rollout_routing_replay"
    assert [RunFacts.of(config_of(**options)).values[flag] for options in ({}, R3)] == [False, True]


# Decoding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
async def test_experts_are_those_that_the_engine_wrote(monkeypatch, experts, dtype, rows):
    monkeypatch.setattr(reading, "PORTION", 64)
    ids = np.random.default_rng(rows).integers(0, experts, (rows, 3, 5), dtype=np.int32)
    meta = {"routed_experts": base64.b64encode(ids.tobytes()).decode()}
    found = await Reader("http://engine", ModelShape(9, 3, 5, experts)).experts(meta, rows)
    assert found.dtype == dtype and np.array_equal(found, ids)


@pytest.mark.parametrize("text", [None, "", base64.b64encode(np.zeros(7, np.int32)).decode()])
async def test_routed_experts_for_other_tokens_are_refused(text):
    with refused("answer.experts", about="http://engine"):
        await Reader("http://engine", ModelShape(9, 3, 5, 8)).experts({"routed_experts": text}, 2)


async def test_the_event_loop_goes_on_while_experts_are_decoded(monkeypatch):
    decode, going, done = reading._decoded, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def waits(*arguments):
        loop.call_soon_threadsafe(going.set)
        assert done.wait(60), "the event loop waits for the decoding"
        return decode(*arguments)

    monkeypatch.setattr(reading, "_decoded", waits)
    meta = {"routed_experts": base64.b64encode(np.zeros(15, np.int32)).decode()}
    decoding = asyncio.create_task(Reader("http://engine", ModelShape(9, 3, 5, 8)).experts(meta, 1))
    await going.wait()
    done.set()
    assert not (await decoding).any()
