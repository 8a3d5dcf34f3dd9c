"""Sampling parameters as hooks give them and as engines get them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RolloutEngine
from tests.refusals import refused


def test_numbers_of_numpy_are_sent_as_numbers():
    sampling = {"temperature": np.float64(0.5), "top_p": np.float32(0.25), "max_new_tokens": np.int64(3)}
    sampling |= {"stop_token_ids": np.array([4, 5]), "stop": ("a", "b")}
    sent = GenerationRequest([1], sampling, 0).sampling
    assert (
        json.loads(json.dumps(sent))
        == sent
        == {
            "temperature": 0.5,
            "top_p": 0.25,
            "max_new_tokens": 3,
            "stop_token_ids": [4, 5],
            "stop": ["a", "b"],
        }
    )
    assert {type(sent[name]) for name in ("temperature", "top_p")} == {float}


@pytest.mark.parametrize(
    "sampling, code",
    [
        ({"temperature": float("nan")}, "request.not_finite"),
        ({"top_p": np.float64("inf")}, "request.not_finite"),
        ({"logit_bias": {5: 1.0}}, "request.sampling"),
        ({"min_p": 0.1}, "request.sampling"),
    ],
)
async def test_unsupported_sampling_is_refused_where_a_hook_requests_it(sampling, code):
    class Client:
        async def generate(self, *_):
            raise AssertionError("asked")

    engine = RolloutEngine(Client(), {"temperature": 1.0}, seed=1, routed_experts=False)
    (name,) = sampling
    with refused(code, about=name):
        await engine.generate([1], sampling)
