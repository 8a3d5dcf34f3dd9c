"""slime's hooks as a form of hooks: what follows `slime:` in a configuration."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slimx.config.schema import Config
from slimx.extras.slime.arguments import RunFacts
from slimx.extras.slime.hooks import GenerateHook, KeepHook, RewardHook, written_for_slime

load_generate = GenerateHook.load
load_keep = KeepHook.load
load_reward = RewardHook.load
is_form_of = written_for_slime


def facts(config: Config) -> dict[str, Any]:
    return asdict(RunFacts.of(config))
