"""The vision tower of tiny vision-language models, for tests."""

from __future__ import annotations

from typing import Any

TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
"""`vision_config` of a Qwen3-VL without the fields that the tests vary."""
SHALLOW = TOWER | {"depth": 2, "num_position_embeddings": 16}
