"""The published config.json of models, as `configs/moe/models` has them."""

from __future__ import annotations

import json
from typing import Any

from tests.needed import ROOT


def published(name: str) -> dict[str, Any]:
    """Returns the config.json of a model by the name of its repository."""
    return json.loads((ROOT / "configs" / "moe" / "models" / name / "config.json").read_text())


QWEN3_30B, DEEPSEEK_V3 = published("Qwen3-30B-A3B"), published("DeepSeek-V3")
