"""Hooks that users copy, against a real server behind the real router: every sampled token comes back with its log-prob
and its place."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import debate, fan_out, judge, single_turn, two_turn
from slimx.config.schema import Config
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Prompt, Trajectory
from slimx.engines.server.engine import Engine
from slimx.engines.server.router import Router
from slimx.extras.agents import multi_turn
from slimx.extras.agents import tools as mcp_tools
from slimx.extras.served_models.client import FrozenEngine
from slimx.models.families import read_model
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext, RolloutContext, RolloutEngine
from slimx.rollout.policy import PolicyClient
from slimx.runtime.ports import free_port
from tests.integration.conftest import ROOT, Weights, publish
from tests.needed import need_package

pytestmark = pytest.mark.integration

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}], answer="46")
SAMPLING = {"temperature": 1.0, "max_new_tokens": 12, "stop_token_ids": list(range(4, 128, 3))}
"""An untrained model hardly ever ends a turn: one token in three does it here."""


@pytest.fixture(scope="module")
def router(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """In front of the session's server."""
    router = Router(free_port(), free_port(), tmp_path_factory.mktemp("router") / "router.log", keys=engine.spec.keys)
    router.start()

    async def ready() -> None:
        await router.wait_ready(60)
        await router.add(engine.spec.url)

    try:
        asyncio.run(ready())
        yield router
    finally:
        asyncio.run(router.stop())


@pytest.fixture
async def client(
    engine: Engine, router: Router, tiny_model: Path, tiny_weights: Weights
) -> AsyncIterator[GenerationClient]:
    """Version 1 is published."""
    await publish(engine, tiny_weights, 1)
    shape, key = ModelShape.of(read_model(tiny_model)), router.keys.api_key
    async with GenerationClient(router.url, shape, api_key=key) as client:
        yield client


@pytest.fixture
def ctx(client: GenerationClient, tiny_model: Path) -> RolloutContext:
    return RolloutContext(
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
    python = {"environment": "examples.python_tool.Solver"}
    counting = {
        "environment": "tests.unit.environments.environment_stand.Counting",
        "environment_options": {"turns": 3},
    }
    lake = {
        "environment": "gymnasium",
        "environment_options": {"id": "FrozenLake-v1", "text_options": {"actions": {"down": 1}}, "max_invalid": 2},
    }
    server = ROOT / "tests" / "extras" / "agents" / "mcp_server.py"
    mcp = {
        "toolbox": "mcp",
        "toolbox_options": {"servers": {"sums": {"command": [sys.executable, str(server)]}}, "tools": ["add"]},
    }
    return {
        "lake": (multi_turn.generate, lake),
        "MCP": (mcp_tools.generate, mcp),
        "single turn": (single_turn.generate, {}),
        "two turns": (two_turn.generate, {}),
        "Python tool": (multi_turn.generate, python),
        "search": (multi_turn.generate, search),
        "three turns": (multi_turn.generate, counting),
        "debate": (debate.generate, {}),
        "fan-out": (fan_out.generate, {"agents": 2}),
    }


NEEDED = {"lake": "gymnasium", "MCP": "mcp"}
"""Packages that examples need."""
TURNS = {"single turn": 1, "two turns": 2, "three turns": 3}
"""Turns of examples that have a known number of them."""
NAMES = ("lake", "MCP", "single turn", "two turns", "Python tool", "search", "three turns", "debate", "fan-out")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.needs("bwrap")] if name == "Python tool" else []) for name in NAMES],
)
async def test_every_example_yields_trajectories_that_can_be_trained(
    name: str, ctx: RolloutContext, tmp_path: Path
) -> None:
    if name in NEEDED:
        need_package(NEEDED[name])
    examples = tools(tmp_path)
    assert examples.keys() == set(NAMES)
    hook, options = examples[name]
    result = await hook(ctx, PROMPT, **options)
    trajectories: list[Trajectory] = result if isinstance(result, list) else [result]
    assert trajectories and len({trajectory.id for trajectory in trajectories}) == len(trajectories)
    for trajectory in trajectories:
        sampled = trajectory.versions() >= 0
        assert sampled.any() and np.isfinite(trajectory.logprobs[sampled]).all()
        assert (trajectory.loss_mask.astype(bool) == sampled).all()
        assert np.isnan(trajectory.logprobs[~sampled]).all()
        assert len(trajectory.routed_experts) == len(trajectory.token_ids) - 1
        turns = sum(span.source == "sampled" for span in trajectory.spans)
        assert turns == TURNS.get(name, turns)


async def test_a_judge_gives_points_to_every_answer(ctx: RolloutContext, router: Router) -> None:
    """The tiny model judges itself: its words are noise, but they have the form that was asked for."""
    trajectory = await single_turn.generate(ctx, PROMPT)
    engines = {"judge": FrozenEngine("judge", router.url, deadline_s=300, retries=0, api_key=router.keys.api_key)}
    points = await judge.reward(RewardContext(PROMPT, ctx.tokenizer, "46", False, engines), trajectory)
    assert points in [number / 10 for number in range(11)]


@pytest.mark.parametrize("hook", ["search", "calculate"])
async def test_hooks_of_slimes_form_bring_what_the_engine_sampled(
    hook: str, client: GenerationClient, tiny_model: Path
) -> None:
    """The oracle is the engine: it scores the whole sequence again, in one request."""
    config = Config.model_validate(
        {
            "run": {"dir": "d"},
            "model": {"path": str(tiny_model)},
            "rollout": {
                "prompts": "p",
                "group_size": 2,
                "generate": f"slime:examples.slime_style.{hook}",
                "options": {"turns": 3},
                "sampling": {"max_new_tokens": 12, "stop_token_ids": SAMPLING["stop_token_ids"]},
            },
            "reward": {"function": "slime:examples.slime_style.right", "options": {"reward_key": "score"}},
            "track": {"rollouts": {"routes": True}},  # of all rollouts
        }
    )
    maker = GroupMaker(config, load_hooks(config), {"actor": PolicyClient(client, load_tokenizer(tiny_model))})
    maker.version = 1  # of the engine's weights
    outcome = await maker.make(PROMPT, group_id="3", number=3)
    maker.close()
    assert outcome.reason is None, outcome.detail
    for trajectory in outcome.group.trajectories:
        sampled = trajectory.versions() >= 0
        assert {span.version for span in trajectory.spans} == {None, 1} and sampled.sum() > 3
        assert (trajectory.loss_mask.astype(bool) == sampled).all() and trajectory.reward in (0.0, 1.0)
        scores = await client.score(trajectory.token_ids.tolist(), routed_experts=True)
        assert np.abs(trajectory.logprobs[1:] - scores.logprobs)[sampled[1:]].max() < 1e-4
        assert (trajectory.routed_experts == scores.routed_experts).all()
    turns = max(span.turn for trajectory in outcome.group.trajectories for span in trajectory.spans)
    assert turns > 0, "some rollout has several turns"
