"""Hooks that users copy, against a real server: every sampled token comes back with its log-prob and its place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import debate, fan_out, single_turn, two_turn
from slimx.data.records import Prompt, Trajectory
from slimx.data.tokens import load_tokenizer
from slimx.models.families import read_model
from slimx.rollout import multi_turn
from slimx.rollout.client import GenerationClient, ModelShape
from slimx.rollout.engine import Engine
from slimx.rollout.hooks import RolloutContext, RolloutEngine
from tests.integration.conftest import Weights, publish

pytestmark = pytest.mark.integration

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}], answer="46")
SAMPLING = {"temperature": 1.0, "max_new_tokens": 12, "stop_token_ids": list(range(4, 128, 3))}
"""An untrained model hardly ever ends a turn: one token in three does it here."""


@pytest.fixture
async def ctx(engine: Engine, tiny_model: Path, tiny_weights: Weights) -> AsyncIterator[RolloutContext]:
    await publish(engine, tiny_weights, 1)
    async with GenerationClient(engine.spec.url, ModelShape.of(read_model(tiny_model))) as client:
        yield RolloutContext(
            engine=RolloutEngine(client, SAMPLING, seed=11, routed_experts=True),
            tokenizer=load_tokenizer(tiny_model),
            version=0,
            evaluation=False,
            seed=11,
            group_id="g",
            index=0,
        )


def tools(tmp_path: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Sums", "text": "12 and 34 make 46"}) + "\n")
    search = {"environment": "examples.search.Search", "environment_options": {"corpus": str(corpus)}}
    python = {"environment": "slimx.environments.python_tool.PythonTool"}
    counting = {"environment": "tests.unit.environment_stand.Counting", "environment_options": {"turns": 3}}
    return {
        "single turn": (single_turn.generate, {}),
        "two turns": (two_turn.generate, {}),
        "Python tool": (multi_turn.generate, python),
        "search": (multi_turn.generate, search),
        "three turns": (multi_turn.generate, counting),
        "debate": (debate.generate, {}),
        "fan-out": (fan_out.generate, {"agents": 2}),
    }


async def test_every_example_yields_trajectories_that_can_be_trained(ctx: RolloutContext, tmp_path: Path) -> None:
    turns = {}
    for name, (hook, options) in tools(tmp_path).items():
        result = await hook(ctx, PROMPT, **options)
        trajectories: list[Trajectory] = result if isinstance(result, list) else [result]
        assert len({trajectory.id for trajectory in trajectories}) == len(trajectories), name
        for trajectory in trajectories:
            sampled = trajectory.versions() >= 0
            assert sampled.any() and np.isfinite(trajectory.logprobs[sampled]).all(), name
            assert (trajectory.loss_mask.astype(bool) == sampled).all(), name
            assert np.isnan(trajectory.logprobs[~sampled]).all(), name
            assert len(trajectory.routed_experts) == len(trajectory.token_ids) - 1, name
            turns[name] = sum(span.source == "sampled" for span in trajectory.spans)
    assert turns["single turn"] == 1 and turns["two turns"] == 2 and turns["three turns"] == 3, turns
