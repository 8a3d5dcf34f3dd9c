"""Functions through which the core loads hooks whose path has the prefix `slime:`.

Every run checks whether its hooks were written for slime, and imports `hooks.py` only if at least one was.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from slimx.config.schema import Config
from slimx.extras.slime.recognition import is_form_of as is_form_of
from slimx.json_types import Json

if TYPE_CHECKING:
    from slimx.extras.slime.hooks import GenerateHook, KeepHook, RewardHook


def load_generate(path: str, config: Config) -> GenerateHook:
    from slimx.extras.slime.hooks import GenerateHook

    return GenerateHook.load(path, config)


def load_keep(path: str, config: Config) -> KeepHook:
    from slimx.extras.slime.hooks import KeepHook

    return KeepHook.load(path, config)


def load_reward(key: str, path: str, options: Json, *, group: bool, facts: Json) -> RewardHook:
    from slimx.extras.slime.hooks import RewardHook

    return RewardHook.load(key, path, options, group=group, facts=facts)


def facts(config: Config) -> Json:
    from slimx.extras.slime.arguments import RunFacts

    return asdict(RunFacts.of(config))
