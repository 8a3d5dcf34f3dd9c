"""Rollouts with tools: a scripted engine whose tokenizer knows them."""

from __future__ import annotations

from typing import Any

from slimx.rollout.hooks import RolloutContext
from tests.extras.agents.proxy_stand import Script, tokenizer
from tests.unit.rollout.rollout_stand import rollout_context


def context(*says: str, **sampling: Any) -> tuple[RolloutContext, Script]:
    """A rollout whose model says these turns."""
    script = Script(*says)
    parameters = {"temperature": 1.0, "max_new_tokens": 400} | sampling
    return rollout_context(script, parameters, tokenizer=tokenizer()), script
