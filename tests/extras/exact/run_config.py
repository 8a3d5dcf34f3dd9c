"""The configuration of a run in exact mode."""

from __future__ import annotations

from typing import Any

from slimx.config.schema import Config


def config(**sections: Any) -> Config:
    """Returns a run in exact mode with `sections` merged in."""
    base = {
        "run": {"dir": "/tmp/x"},
        "model": {"path": "/model"},
        "numerics": {"mode": "exact"},
        "rollout": {"prompts": "p"},
        "reward": {"function": "a.b"},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return Config.model_validate(base)
