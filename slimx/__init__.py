"""slimx: reinforcement-learning training for large mixture-of-experts language models."""

import importlib
import importlib.util

__version__ = "0.1.0"
_EXPORTS = {
    "Config": "slimx.config.schema",
    "load_config": "slimx.config.load",
    "Group": "slimx.data.records",
    "Prompt": "slimx.data.records",
    "Trajectory": "slimx.data.records",
    "GivenUp": "slimx.rollout.hooks",
    "RewardContext": "slimx.rollout.hooks",
    "RolloutContext": "slimx.rollout.hooks",
    "SlimxError": "slimx.errors",
}
"""Public names of the core, mapped to the modules that define them. A name is imported on first use, so `import slimx`
does not import torch. Extras add names as entry points. The types of all names are in __init__.pyi."""
_GROUP = "slimx.exports"
"""Entry point group of the public names that extras add."""


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name == "__all__":
        from slimx import entry_points

        return ["__version__", *_EXPORTS, *entry_points.find(_GROUP)]
    if not name.startswith("_") and importlib.util.find_spec(f"slimx.{name}") is None:
        from slimx import entry_points

        if name in entry_points.find(_GROUP):
            return entry_points.load(_GROUP, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
