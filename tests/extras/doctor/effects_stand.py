"""Configurations whose terms are probed."""

from __future__ import annotations

from typing import Any

from slimx.config.schema import Config


def config(algorithm: dict[str, Any], **schedule: Any) -> Config:
    name = algorithm.get("name")
    return Config.model_validate(
        {
            "run": {"dir": "r"},
            "model": {"path": "m"},
            "rollout": {"prompts": "p", "group_size": 4, **({"engines": []} if name == "sft" else {})},
            "reward": {"function": None} if name in ("sft", "distillation") else {},
            "algorithm": algorithm,
            "critic": {} if name == "ppo" else None,
            "schedule": schedule,
        }
    )
