"""Rules about trackers."""

from __future__ import annotations

import importlib.util

from slimx.config.rule import Problems, rule
from slimx.config.sections.run import Track


@rule("track.package", "track")
def has_trackers(track: Track, local_device: str) -> Problems:
    for module in ("wandb", "tensorboard", "mlflow", "swanlab"):
        if (given := getattr(track, module)) and importlib.util.find_spec(module) is None:
            key, package = f"track.{module}", {"mlflow": "mlflow-skinny"}.get(module, module)
            off = "false" if isinstance(given, bool) else "null"
            yield key, f"{key} is set but {package} is not installed: pip install {package} or set {key}={off}"
