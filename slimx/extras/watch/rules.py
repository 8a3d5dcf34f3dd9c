"""Configuration rules for trackers."""

from __future__ import annotations

import importlib.util

from slimx.config.rule import Problems, rule
from slimx.config.sections.general import Track


@rule("track.package", "track")
def has_trackers(track: Track, local_device: str) -> Problems:
    for module in ("wandb", "tensorboard", "mlflow", "swanlab"):
        value = getattr(track, module)
        if value and importlib.util.find_spec(module) is None:
            key = f"track.{module}"
            package = "mlflow-skinny" if module == "mlflow" else module
            off = "false" if isinstance(value, bool) else "null"
            yield key, f"{key} is set but {package} is not installed; run pip install {package} or set {key}={off}"
