"""Frozen models never compute log-probs of a policy's image tokens, which they would read as text."""

from __future__ import annotations

import pickle

import pytest

from slimx.engines.server.keys import Keys
from slimx.extras.quickstart.make_vision_model import TOKENS
from slimx.extras.served_models.client import FrozenEngine, image_placeholder
from slimx.extras.served_models.engines import ServedModels
from tests.extras.vision.vision_stand import run
from tests.refusals import refused

PLACEHOLDER = TOKENS["image_token_id"]
URL = "http://127.0.0.1:9"
"""Address at which nothing listens: a request would fail with another error."""


@pytest.fixture
def engine(tmp_path) -> FrozenEngine:
    client = ServedModels(run(tmp_path), "cpu", tmp_path, note=print)._client("judge", URL, Keys())
    client.deadline_s = 1.0
    return client


async def test_log_probs_of_images_are_refused(engine):
    for client in (engine, pickle.loads(pickle.dumps(engine))):  # a reward in a process of its own gets a copy
        with refused("frozen.image", about="judge"):
            await client.logprobs([5, PLACEHOLDER, 6])
        with refused("frozen.image", about="judge"):
            await client.top_logprobs([5, PLACEHOLDER, 6], top=2)


def test_only_runs_with_images_have_a_placeholder(tmp_path):
    config = run(tmp_path)
    trainer = config.trainer.model_copy(update={"vision": None})
    assert image_placeholder(config) == PLACEHOLDER
    assert image_placeholder(config.model_copy(update={"trainer": trainer})) is None
