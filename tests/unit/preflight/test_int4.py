"""INT4 is refused by name, before anything starts, wherever it has no form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimx.config.rule import broken
from slimx.config.schema import Config
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.preflight.checks import RULES, model_facts
from tests.checkpoint_stand import QWEN3_MOE

GROUPED = QWEN3_MOE | {"hidden_size": 64, "moe_intermediate_size": 64}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    },
}


def found(folder: Path, model: dict[str, Any], trainer: dict[str, Any] | None = None, **rollout: Any) -> set[tuple]:
    """Codes of the broken rules about INT4, and what they are about."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    values = {"run": {"dir": "r"}, "model": {"path": str(folder)}, "rollout": {"prompts": "p", **rollout}}
    config = Config.model_validate({**values, "trainer": trainer or {}})
    facts = model_facts(config, read_model(folder)) | {"sizes": sizes_of(config.trainer)}
    return {(b.code, b.about) for b in broken(RULES, facts) if "int4" in b.code or "qat" in b.code}


def test_engines_that_would_start_from_int4_are_refused(tmp_path: Path) -> None:
    packed = GROUPED | {"quantization_config": INT4}
    assert found(tmp_path / "int4", packed) == {("engines.int4_model", "rollout.engines.model")}
    found(tmp_path / "bf16", GROUPED)
    assert found(tmp_path / "int4", packed, engines=[{"model": str(tmp_path / "bf16")}]) == set()
    fp8 = GROUPED | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert found(tmp_path / "fp8", fp8) == set()
