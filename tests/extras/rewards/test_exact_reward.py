"""The exact reward pays for the answer alone, and refuses a prompt that has none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from slimx.data.records import Prompt, Span, Trajectory
from slimx.extras.rewards.exact import reward
from tests.refusals import refused


@dataclass
class Context:
    prompt: Prompt
    final_answer: str


def rewarded(text: str, answer: str | None) -> float:
    trajectory = Trajectory(
        id="t",
        rollout_id="r",
        group_id="g",
        index=0,
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, np.uint8),
        logprobs=np.full(2, np.nan, np.float32),
        spans=[Span(start=0, stop=1, source="prompt"), Span(start=1, stop=2, source="sampled", version=0)],
    )
    return asyncio.run(reward(Context(Prompt(id="p7", token_ids=[1], answer=answer), text), trajectory))


def test_the_right_answer_earns_one_whatever_white_space_surrounds_it():
    for text, answer in (("46", "46"), (" 46\n", "46"), ("46", "\t46 "), ("", " ")):
        value = rewarded(text, answer)
        assert (value, type(value)) == (1.0, float)


def test_anything_else_pays_nothing():
    for text in ("45", "46.", "4 6", "046", "46 46", "", "the answer is 46"):
        value = rewarded(text, "46")
        assert (value, type(value)) == (0.0, float)


def test_a_prompt_without_an_answer_is_refused_by_id():
    with refused("reward.answer", about="p7"):
        rewarded("46", None)
