"""Sampling parameters as hooks give them and as engines get them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slimx.errors import SlimxError
from slimx.rollout.client.sampling import checked_sampling
from slimx.rollout.hooks import RolloutEngine


def test_numbers_of_numpy_are_sent_as_numbers():
    given = {"temperature": np.float64(0.5), "top_p": np.float32(0.25), "max_new_tokens": np.int64(3)}
    given |= {"stop_token_ids": np.array([4, 5]), "stop": ("a", "b")}
    asked = checked_sampling(given)
    assert (
        json.loads(json.dumps(asked))
        == asked
        == {
            "temperature": 0.5,
            "top_p": 0.25,
            "max_new_tokens": 3,
            "stop_token_ids": [4, 5],
            "stop": ["a", "b"],
        }
    )
    assert {type(asked[name]) for name in ("temperature", "top_p")} == {float}


@pytest.mark.parametrize(
    "given, says",
    [
        ({"temperature": float("nan")}, "sampling parameter temperature is nan; give a finite number"),
        ({"top_p": np.float64("inf")}, "sampling parameter top_p is inf"),
        ({"logit_bias": {5: 1.0}}, "sampling parameter logit_bias is not supported by the engines; known are"),
        ({"min_p": 0.1}, "min_p cannot be combined with a seed"),
    ],
)
async def test_what_cannot_be_carried_out_is_refused_where_a_hook_asks_for_it(given, says):
    class Client:
        async def generate(self, *_):
            raise AssertionError("asked")

    engine = RolloutEngine(Client(), {"temperature": 1.0}, seed=1, routed_experts=False)
    with pytest.raises(SlimxError, match=says):
        await engine.generate([1], given)
