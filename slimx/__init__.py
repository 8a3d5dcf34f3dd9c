"""slimx: reinforcement-learning training for large mixture-of-experts language models."""

import importlib

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
    "evaluate": "slimx.commands.script",
    "train": "slimx.commands.script",
}
"""Public names of the package, mapped to the modules that define them. A name is imported on first use, so `import
slimx` does not import torch. The types of the names are in __init__.pyi."""
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
