"""Rollouts with tools: a scripted engine whose tokenizer knows them."""

from __future__ import annotations

from typing import Any

from slimx.rollout.hooks import RolloutContext, RolloutEngine
from tests.extras.agents.proxy_stand import Script, tokenizer


def context(*says: str, **sampling: Any) -> tuple[RolloutContext, Script]:
    """A rollout whose model says these turns."""
    script = Script(*says)
    parameters = {"temperature": 1.0, "max_new_tokens": 400} | sampling
    ctx = RolloutContext(
        engine=RolloutEngine(script, parameters, seed=5, routed_experts=False),  # type: ignore[arg-type]
        tokenizer=tokenizer(),
        version=0,
        evaluation=False,
        seed=5,
        group_id="g0",
        index=0,
    )
    return ctx, script
