"""Training in fp8 is refused by name, before anything starts, where it is unproven, and planned where it is proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.preflight.facts import model_facts
from tests.checkpoint_stand import QWEN3_MOE
from tests.extras.convert.convert_stand import QWEN3
from tests.integration.engine_families import MODELS
from tests.published import DEEPSEEK_V3 as V3
from tests.refusals import invalid

WIDE = QWEN3_MOE | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
WIDE |= {"moe_intermediate_size": 256}
BASE: dict[str, Any] = {"run": {"dir": "r"}, "rollout": {"prompts": "p"}, "numerics": {"dtype": "bfloat16"}}


def planned(
    folder: Path, model: dict[str, Any], trainer: dict[str, Any], **sections: Any
) -> tuple[Config, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    config = Config.model_validate({**BASE, "model": {"path": str(folder)}, "trainer": trainer, **sections})
    return config, model_facts(config, read_model(folder)) | {"sizes": sizes_of(config.trainer)}


@pytest.mark.parametrize(
    ("model", "trainer", "expected"),
    [
        (WIDE, {"fp8": "blockwise"}, None),
        (WIDE, {"fp8": "blockwise", "world_size": 2, "tensor": 2, "expert_tensor": 2}, None),
        (WIDE, {"fp8": "mxfp8", "world_size": 2, "tensor": 2, "expert_tensor": 2}, None),
        (
            WIDE,
            {"fp8": "blockwise", "world_size": 8, "tensor": 2, "expert": 2, "expert_tensor": 4},
            ("fp8.blocks", "trainer.expert_tensor"),
        ),
        (WIDE | {"head_dim": 64}, {"fp8": "blockwise"}, ("fp8.blocks", "trainer.fp8")),
        (WIDE | {"head_dim": 64}, {"fp8": "mxfp8"}, None),
        (WIDE | {"moe_intermediate_size": 192}, {"fp8": "blockwise"}, ("fp8.blocks", "trainer.fp8")),
        # kv_a_proj_with_mqa has 576 rows, of which the last block has 64: a matrix may end inside a block.
        (V3, {"fp8": "blockwise", "world_size": 8, "tensor": 8, "expert_tensor": 8}, None),
        (V3, {"fp8": "mxfp8"}, None),
        (V3 | {"qk_rope_head_dim": 48}, {"fp8": "blockwise"}, None),
        (V3 | {"qk_rope_head_dim": 48}, {"fp8": "mxfp8"}, ("fp8.blocks", "trainer.fp8")),
        (V3 | {"qk_rope_head_dim": 40}, {"fp8": "blockwise"}, ("fp8.blocks", "trainer.fp8")),
        # Of gate and up, which one matrix joins, the first would end inside a block.
        (V3 | {"moe_intermediate_size": 2112}, {"fp8": "blockwise"}, ("fp8.blocks", "trainer.fp8")),
    ],
)
def test_blocks_that_ranks_would_cut_are_refused(
    tmp_path: Path, model: dict[str, Any], trainer: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    _, facts = planned(tmp_path / "model", model, trainer)
    found = {(b.code, b.about) for b in broken(all_rules(), facts) if b.code.startswith("fp8.")}
    assert found == ({expected} if expected else set())


@pytest.mark.parametrize("other", [{}, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}])
def test_a_model_whose_layers_were_not_compared_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    _, facts = planned(tmp_path / "model", QWEN3 | other, {"fp8": "mxfp8"})
    assert ("unproven.architecture", "model.path") in {(b.code, b.about) for b in broken(all_rules(), facts)}


@pytest.mark.parametrize(("model", "refused"), [(WIDE, False), (MODELS["kimi_k25"], True)])
def test_a_model_without_matrices_in_fp8_is_not_published_in_fp8(
    tmp_path: Path, model: dict[str, Any], refused: bool
) -> None:
    _, facts = planned(tmp_path / "model", model, {}, publish={"quantize": "te"})
    assert ("publish.fp8" in {b.code for b in broken(all_rules(), facts)}) == refused


@pytest.mark.parametrize(
    ("sections", "code", "about"),
    [
        ({"numerics": {"dtype": "float32"}}, "fp8.dtype", "numerics.dtype"),
        ({"numerics": {"dtype": "bfloat16", "mode": "exact"}}, "unproven", "numerics.mode"),
        ({"publish": {"quantize": "ieee"}}, "fp8.quantize", "publish.quantize"),
        ({"publish": {"quantize": "ue8m0"}}, "fp8.quantize", "publish.quantize"),
        ({"publish": {"quantize": "te"}, "trainer": {"fp8": "mxfp8"}}, "fp8.quantize", "publish.quantize"),
        ({"cluster": {"gpu": "gb300"}}, "fp8.gpu", "trainer.fp8"),
        ({"cluster": {"gpu": "h100"}, "trainer": {"fp8": "mxfp8"}}, "fp8.gpu", "trainer.fp8"),
        ({"trainer": {"fp8": "mxfp8", "lora": {"rank": 4, "alpha": 8}}}, "unproven", "trainer.lora"),
        ({"trainer": {"fp8": "mxfp8", "qat": "int4"}}, "unproven", "trainer.qat"),
        (
            {"trainer": {"fp8": "mxfp8", "optimizer": {"kind": "muon"}, "distributed_optimizer": False}},
            "unproven",
            "trainer.optimizer.kind",
        ),
        (
            {"trainer": {"fp8": "mxfp8", "optimizer": {"offload_fraction": 0.5}}},
            "unproven",
            "trainer.optimizer.offload_fraction",
        ),
        (
            {"trainer": {"fp8": "mxfp8", "optimizer": {"moments_dtype": "bfloat16"}}},
            "unproven",
            "trainer.optimizer.moments_dtype",
        ),
        (
            {"trainer": {"fp8": "mxfp8", "grad_reduce_in_fp32": False}},
            "unproven",
            "trainer.grad_reduce_in_fp32",
        ),
        (
            {
                "trainer": {"fp8": "mxfp8", "overlap_param_gather": True},
                "rollout": {**BASE["rollout"], "prompts_per_step": 8},
                "schedule": {"updates_per_step": 2},
            },
            "unproven",
            "trainer.overlap_param_gather",
        ),
        ({"trainer": {"fp8": "mxfp8", "freeze": ["*router*"]}}, "unproven", "trainer.freeze"),
        ({"trainer": {"fp8": "mxfp8", "moe": {"dispatcher": "flex"}}}, "unproven", "trainer.moe.dispatcher"),
        ({"algorithm": {"teacher": "t"}}, "unproven", "algorithm.teacher"),
        ({"algorithm": {"name": "bradley_terry"}}, "unproven", "algorithm.loss"),
        ({"critic": {}}, "unproven", "critic"),
        ({"trainer": {"megatron": {"fp8": "e4m3"}}}, "trainer.megatron", "trainer.megatron.fp8"),
        ({"trainer": {"megatron": {"fp8_recipe": "mxfp8"}}}, "trainer.megatron", "trainer.megatron.fp8_recipe"),
        ({"trainer": {"fp8": "mxfp8", "megatron": {"fp8_param": 1}}}, "trainer.megatron", "trainer.megatron.fp8_param"),
    ],
)
def test_an_unproven_combination_is_refused(sections: dict[str, Any], code: str, about: str) -> None:
    values = {**BASE, "model": {"path": "m"}, "trainer": {"fp8": "blockwise"}}
    Config.model_validate(values | {"publish": {"quantize": "te"}, "cluster": {"gpu": "h100"}})
    with invalid(code, about=about):
        Config.model_validate(values | sections)


@pytest.mark.parametrize("split", [{"pipeline": 2, "virtual_pipeline": 2}, {"context": 2}])
def test_stages_and_parts_of_sequences_are_taken(split: dict[str, int]) -> None:
    trainer = {"fp8": "mxfp8", "world_size": 2, **split}
    Config.model_validate({**BASE, "model": {"path": "m"}, "trainer": trainer})


@pytest.mark.parametrize(("recipe", "bytes_per_weight"), [("blockwise", 1 + 4 / 128**2), ("mxfp8", 1 + 1 / 32)])
def test_a_plan_counts_the_copies_of_weights(tmp_path: Path, recipe: str, bytes_per_weight: float) -> None:
    found = {}
    for fp8 in (None, recipe):
        config, facts = planned(tmp_path / "model", WIDE, {"fp8": fp8}, schedule={"colocate": True})
        for device in ("cuda", "cpu"):
            (found[fp8, device],) = trainer_memory(config, facts["spec"], facts["sizes"], device)
    heads, hidden, inner, experts = 4 + 2 * 2, 256, 256, WIDE["num_experts"]
    layer = (heads + 4) * 128 * hidden + 3 * experts * hidden * inner
    added = 2 * layer * WIDE["num_hidden_layers"] * bytes_per_weight
    assert found[recipe, "cuda"].copies == added
    assert found[recipe, "cuda"].weights == found[None, "cuda"].weights
    assert found[recipe, "cuda"].peak - found[None, "cuda"].peak == added
    assert found[recipe, "cuda"].away == found[None, "cuda"].away  # they go when the trainer leaves the GPU
    assert found[recipe, "cpu"] == found[None, "cpu"]
