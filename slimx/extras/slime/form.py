"""slime's hooks as a form of hooks: what follows `slime:` in a configuration.

Every run asks whether its hooks are of this form; `hooks.py` is imported for one that is.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slimx.config.schema import Config
from slimx.extras.slime.recognition import is_form_of as is_form_of


def load_generate(path: str, config: Config) -> Any:
    from slimx.extras.slime.hooks import GenerateHook

    return GenerateHook.load(path, config)


def load_keep(path: str, config: Config) -> Any:
    from slimx.extras.slime.hooks import KeepHook

    return KeepHook.load(path, config)


def load_reward(key: str, path: str, options: dict[str, Any], *, group: bool, facts: dict[str, Any]) -> Any:
    from slimx.extras.slime.hooks import RewardHook

    return RewardHook.load(key, path, options, group=group, facts=facts)


def facts(config: Config) -> dict[str, Any]:
    from slimx.extras.slime.arguments import RunFacts

    return asdict(RunFacts.of(config))
