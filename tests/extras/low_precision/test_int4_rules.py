"""INT4 is refused by name, before anything starts, where no tensor can be stored in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.preflight.facts import model_facts
from tests.checkpoint_stand import QWEN3_MOE
from tests.extras.convert.convert_stand import QWEN3
from tests.extras.families.gpt_oss_stand import HF as GPT_OSS
from tests.refusals import invalid

GROUPED = QWEN3_MOE | {"hidden_size": 64, "moe_intermediate_size": 64}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    },
}


def found(
    folder: Path,
    model: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    publish: dict[str, Any] | None = None,
    **rollout: Any,
) -> set[tuple]:
    """Returns the codes of the broken rules about INT4, and their subjects."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    values = {"run": {"dir": "r"}, "model": {"path": str(folder)}, "rollout": {"prompts": "p", **rollout}}
    config = Config.model_validate({**values, "trainer": trainer or {}, "publish": publish or {}})
    facts = model_facts(config, read_model(folder)) | {"sizes": sizes_of(config.trainer)}
    return {
        (b.code, b.about)
        for b in broken(all_rules(), facts)
        if "int4" in b.code or "qat" in b.code or b.code == "model.field"
    }


def test_engines_that_would_start_from_int4_are_refused(tmp_path: Path) -> None:
    packed = GROUPED | {"quantization_config": INT4}
    assert found(tmp_path / "int4", packed) == {("engines.int4_model", "rollout.engines.model")}
    found(tmp_path / "bf16", GROUPED)
    assert found(tmp_path / "int4", packed, engines=[{"model": str(tmp_path / "bf16")}]) == set()
    fp8 = GROUPED | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert found(tmp_path / "fp8", fp8) == set()


def test_the_model_of_an_engine_group_is_read_like_the_trained_one(tmp_path: Path) -> None:
    found(tmp_path / "engine", GROUPED)
    (tmp_path / "engine" / "config.json").write_text(json.dumps(GROUPED | {"quantization_config": ["int4"]}))
    broken_rules = found(tmp_path / "bf16", GROUPED, engines=[{"model": str(tmp_path / "engine")}])
    assert broken_rules == {("model.field", "quantization_config")}


def test_experts_that_the_checkpoint_stacks_have_no_int4(tmp_path: Path) -> None:
    """Uses columns of complete groups; still, an export or an engine would have to pack the stack."""
    assert found(tmp_path / "qat", GPT_OSS, {"qat": "int4"}) == {("qat.experts", "trainer.qat")}
    assert ("qat.experts", "publish.quantize") in published(
        tmp_path / "published", GPT_OSS, model=str(tmp_path / "int4")
    )


TRITON = {"sglang": {"moe_runner_backend": "triton"}}


def published(folder: Path, hf: dict[str, Any], **engine: Any) -> set[tuple]:
    """Returns the same for a run that publishes INT4 to engines with Triton's kernels."""
    return found(folder, hf, publish={"quantize": "int4"}, engines=[TRITON | engine])


def test_int4_is_published_to_engines_that_start_from_it(tmp_path: Path) -> None:
    for name, model in (("int4", GROUPED | {"quantization_config": INT4}), ("bf16", GROUPED)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(model))
    other = {("engines.int4_model", "rollout.engines.model")}
    assert published(tmp_path / "bf16", GROUPED, model=str(tmp_path / "int4")) == set()
    assert published(tmp_path / "bf16", GROUPED, model=str(tmp_path / "later")) == set()
    assert published(tmp_path / "bf16", GROUPED, model=str(tmp_path / "bf16")) == other
    dense = {("qat.experts", "publish.quantize")}
    assert published(tmp_path / "dense", QWEN3, model=str(tmp_path / "int4")) == dense


@pytest.mark.parametrize(
    ("model", "trainer", "about"),
    [
        (GROUPED, {}, None),
        (GROUPED, {"world_size": 2, "tensor": 2, "expert_tensor": 2}, None),
        (GROUPED, {"world_size": 4, "tensor": 4, "expert_tensor": 4}, ("qat.groups", "trainer.expert_tensor")),
        (GROUPED, {"world_size": 4, "tensor": 4, "expert": 4, "expert_tensor": 1}, None),
        (GROUPED | {"hidden_size": 72}, {}, ("qat.groups", "trainer.qat")),
        (GROUPED | {"moe_intermediate_size": 40}, {}, ("qat.groups", "trainer.qat")),
        (QWEN3, {}, ("qat.experts", "trainer.qat")),
    ],
)
def test_groups_that_do_not_divide_are_refused(
    tmp_path: Path, model: dict[str, Any], trainer: dict[str, Any], about: tuple | None
) -> None:
    assert found(tmp_path / "model", model, trainer | {"qat": "int4"}) == ({about} if about else set())
    assert found(tmp_path / "model", model, trainer) == set()


@pytest.mark.parametrize(
    ("sections", "code", "about"),
    [
        ({"numerics": {"dtype": "float32"}}, "qat.dtype", "numerics.dtype"),
        ({"publish": {"quantize": "ieee"}}, "unproven", "publish.quantize"),
        ({"trainer": {"qat": "int4", "lora": {"rank": 4, "alpha": 8}}}, "unproven", "trainer.lora"),
    ],
)
def test_an_unproven_combination_is_refused(sections: dict[str, Any], code: str, about: str) -> None:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "trainer": {"qat": "int4"}}
    with invalid(code, about=about):
        Config.model_validate({**values, **sections})


@pytest.mark.parametrize(
    ("sections", "about"),
    [
        ({"numerics": {"dtype": "float32"}}, "numerics.dtype"),
        ({"publish": {"quantize": "int4", "encoding": "hf"}}, "publish.encoding"),
        ({"engine": {"model": "packed"}}, "rollout.engines.sglang.moe_runner_backend"),
        (
            {"engine": {"model": "packed", "sglang": {"enforce_shared_experts_fusion": True}}},
            "rollout.engines.sglang.enforce_shared_experts_fusion",
        ),
        ({"engine": TRITON}, "rollout.engines.model"),
    ],
)
def test_engines_that_could_not_take_codes_are_refused(sections: dict[str, Any], about: str) -> None:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "numerics": {"dtype": "bfloat16"}}
    rollout = {"prompts": "p", "engines": [sections.pop("engine", {"model": "packed"} | TRITON)]}
    with invalid("publish.int4", about=about):
        Config.model_validate({**values, "publish": {"quantize": "int4"}, "rollout": rollout, **sections})


def test_drafts_were_never_proven_with_codes() -> None:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "numerics": {"dtype": "bfloat16"}}
    engine = {"model": "packed", "sglang": TRITON["sglang"] | {"speculative_algorithm": "EAGLE"}}
    with invalid("unproven", about="rollout.engines.sglang.speculative_algorithm"):
        rollout = {"prompts": "p", "engines": [engine]}
        Config.model_validate({**values, "publish": {"quantize": "int4"}, "rollout": rollout})
