"""The tables of GLM-4.5 and MiniMax-M2 name what the published checkpoints hold; what cannot be built or served is
refused; and families that megatron-core cannot build are refused by name as long as that is so."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slimx.config.schema import Config
from slimx.extras.families import glm4_moe, glm4_moe_lite, minimax_m2
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Rect
from slimx.layout.parts import matrix
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.models.files.reader import CheckpointReader
from slimx.reshard.plan.publication import publication_plan
from tests.refusals import refused

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
"""config.json of zai-org/GLM-4.5."""
AIR = GLM | {
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
"""config.json of zai-org/GLM-4.7-Flash."""
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
"""config.json of MiniMaxAI/MiniMax-M2."""
PUBLISHED = [(glm4_moe, GLM), (glm4_moe, AIR), (glm4_moe_lite, FLASH), (minimax_m2, MINIMAX)]


def billions(shapes: Iterable[tuple[int, ...]]) -> float:
    return sum(math.prod(shape) for shape in shapes) / 1e9


def read(directory: Path, hf: dict[str, Any], **how: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, **how)


# The published checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "count"), [(GLM, 358.3), (AIR, 110.5), (FLASH, 31.2), (MINIMAX, 228.7)], ids=["4.5", "Air", "Flash", "M2"]
)
def test_parameters_are_as_many_as_the_published_files_hold(tmp_path: Path, hf: dict[str, Any], count: float):
    """As Hugging Face counts them: layers of multi-token prediction with their copies of embedding and output."""
    table = read(tmp_path, hf).table
    shapes = table.checkpoint_shapes()
    repeated = [shapes[original] for original in table.aliases.values()]
    assert billions([*shapes.values(), *table.frozen.values(), *repeated]) == pytest.approx(count, abs=0.06)


def test_the_prediction_layer_of_glm_is_carried_over_or_built(tmp_path: Path):
    layer = "model.layers.92."
    unbuilt, built = read(tmp_path, GLM).table, read(tmp_path, GLM, mtp_layers=1).table
    assert set(unbuilt.aliases) == {layer + "embed_tokens.weight", layer + "shared_head.head.weight"}
    names = {name.removeprefix(layer) for name in unbuilt.frozen}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"} < names
    assert {"self_attn.q_proj.bias", "self_attn.k_norm.weight", "mlp.gate.e_score_correction_bias"} < names
    assert "mlp.experts.159.down_proj.weight" in names and "mlp.shared_experts.up_proj.weight" in names
    assert not built.frozen and set(unbuilt.frozen) == set(built.checkpoint_shapes()) - set(unbuilt.checkpoint_shapes())


@pytest.mark.parametrize(("family", "hf"), PUBLISHED, ids=["4.5", "Air", "Flash", "M2"])
def test_an_engine_takes_every_tensor_of_the_checkpoint(family: Any, hf: dict[str, Any]):
    table = family.engine_table(hf | {"num_hidden_layers": 4})
    taken = {name for part in EngineLayout(table, EngineSizes(tensor=4)).parts() for name in part.sources}
    assert taken == set(family.weight_table(hf | {"num_hidden_layers": 4}).checkpoint_shapes())


def test_a_part_of_each_head_rotates_as_either_form_of_the_config_says():
    present = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    bare = {key: value for key, value in MINIMAX.items() if key != "rotary_dim"}
    for family, hf, share in (
        (glm4_moe, GLM, 0.5),
        (glm4_moe, {key: value for key, value in GLM.items() if key != "partial_rotary_factor"}, 0.5),
        (glm4_moe, GLM | present, 0.25),
        (minimax_m2, MINIMAX, 0.5),
        (minimax_m2, bare, 1.0),
        (minimax_m2, bare | present, 0.25),
    ):
        assert family.gpt_arguments(hf)["rotary_percent"] == share


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "problem"),
    [
        (GLM | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (GLM | {"norm_topk_prob": False}, "norm_topk_prob"),
        (GLM | {"n_group": 8, "topk_group": 2}, "num_experts_per_tok"),
        (GLM | {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        (GLM | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (FLASH | {"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types"),
        (MINIMAX | {"use_qk_norm": False}, "use_qk_norm"),
        (MINIMAX | {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX | {"attn_type_list": [0, 1] * 31}, "attn_type_list"),
        (MINIMAX | {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        (MINIMAX | {"use_routing_bias": False}, "use_routing_bias"),
        (MINIMAX | {"shared_intermediate_size": 1536}, "shared_intermediate_size"),
        (MINIMAX | {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_model_is_refused_by_its_setting(tmp_path: Path, hf: dict[str, Any], problem: str):
    with refused("model.unsupported", about=problem):
        read(tmp_path, hf)


def test_a_norm_per_head_excludes_the_norm_over_all_heads():
    from slimx.trainer.model.projection_norm import install

    with refused("trainer.qk_layernorm", about="trainer.megatron.qk_layernorm"):
        install(SimpleNamespace(layer_specs=[]), SimpleNamespace(qk_layernorm=True))


def test_prediction_layers_that_minimax_only_declares_are_refused(tmp_path: Path):
    with refused("model.mtp_layers", about="trainer.megatron.mtp_num_layers"):
        read(tmp_path, MINIMAX, mtp_layers=1)


@pytest.mark.parametrize("key", ["use_qk_norm", "use_routing_bias", "scoring_func", "rotary_dim"])
def test_an_engine_is_refused_a_minimax_that_it_would_misread(key: str):
    """transformers writes such files; it takes the fields for granted, SGLang their opposites."""
    with refused("model.served_field", about=key):
        minimax_m2.engine_table({name: value for name, value in MINIMAX.items() if name != key})


def test_more_than_one_shared_expert_is_not_fused():
    with refused("model.fused_shared_experts", about="n_shared_experts"):
        glm4_moe.engine_table(GLM | {"n_shared_experts": 2}, fused_shared_experts=True)


def test_refusals_because_of_missing_cuda_kernels_are_still_needed():
    """When one of these fails, upstream can do without them: let
    slimx.extras.recurrent.adapters.megatron.delta_net or .mamba go."""
    from megatron.core.ssm.gated_delta_net import HAVE_FLA, GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import HAVE_MAMBA_SSM, MambaMixer

    assert not HAVE_FLA and not HAVE_MAMBA_SSM
    with pytest.raises(ImportError):
        MambaMixer(None, None, 64)
    # Whatever kernels are there, without the fused one of mamba_ssm it refuses packed sequences.
    assert re.search(
        r"not self\.use_mem_eff_path:.*?assert packed_seq_params is None", inspect.getsource(MambaMixer.forward), re.S
    )
    # What torch alone computes refuses packed sequences.
    assert re.search(r"assert \(?\s*not self\.config\.deterministic_mode", inspect.getsource(GatedDeltaNet.forward))


# Publication ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["hf", "local"])
@pytest.mark.parametrize(("family", "hf"), PUBLISHED[1:], ids=["Air", "Flash", "M2"])
def test_fp32_weights_of_an_engine_are_published_in_fp32(tmp_path: Path, family: Any, hf: dict[str, Any], encoding):
    """SGLang's routers of these families have fp32 weights in a bf16 model."""
    spec = read(tmp_path, hf | {"num_hidden_layers": 2, "attn_type_list": None, "quantization_config": None})
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "numerics": {"dtype": "bfloat16"},
            "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
            "publish": {"encoding": encoding},
        }
    )
    plan = publication_plan(config, spec, Sizes(), "cuda").plan
    sent = {tensor.name: tensor.dtype for buckets in plan.buckets for bucket in buckets for tensor in bucket.tensors}
    exact = {name for name in sent if name.endswith(("gate.weight", "e_score_correction_bias"))}
    assert len(exact) == 2 * (2 if family is minimax_m2 else 1)
    assert {name for name, dtype in sent.items() if dtype == "float32"} == exact
    assert {dtype for name, dtype in sent.items() if name not in exact} == {"bfloat16"}


@pytest.mark.parametrize("hf", [AIR, FLASH], ids=["GLM-4.5-Air", "GLM-4.7-Flash"])
@pytest.mark.parametrize(("device", "expert", "fuses"), [("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)])
def test_a_fusion_that_sglang_would_not_make_is_refused(tmp_path: Path, hf, device, expert, fuses):
    spec = read(tmp_path, hf | {"num_hidden_layers": 2, "attn_type_list": None, "quantization_config": None})
    sglang = {"enforce_shared_experts_fusion": True}
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "rollout": {"prompts": "p", "engines": [{"tensor": 2, "expert": expert, "sglang": sglang}]},
        }
    )
    if fuses:
        assert publication_plan(config, spec, Sizes(), device).encoding == "local"
        return
    with refused("publish.unfused", about="rollout.engines.sglang.enforce_shared_experts_fusion"):
        publication_plan(config, spec, Sizes(), device)


# Files in fp8 -----------------------------------------------------------------------------------------------------


def test_the_fp8_blocks_of_minimax_are_read(tmp_path: Path):
    """As published: all that the table calls quantized in fp8 with a scale per block, the rest as it is."""
    small = {"num_hidden_layers": 1, "attn_type_list": [1], "hidden_size": 256, "intermediate_size": 192}
    small |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    hf = MINIMAX | small | {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    table = read(tmp_path, hf).table
    codes = {name for entry in table.entries() if entry.row.quantized for name in entry.sources}
    stored: dict[str, torch.Tensor] = {}
    for name, shape in table.checkpoint_shapes().items():
        stored[name] = torch.randn(shape)
        if name in codes:
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = torch.rand([-(-length // 128) for length in shape])
    save_file(stored, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    reader.check(table, quantized=True)
    for name, shape in table.checkpoint_shapes().items():
        rows, cols = matrix(shape)
        expected = stored[name].float().view(rows, cols)
        if name in codes:
            scale = stored[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected = (expected * scale[:rows, :cols]).to(torch.bfloat16).float()
        found = reader.read(name, Rect(0, rows // 2, 0, rows - rows // 2, cols, 0, 0))
        assert torch.equal(found.float(), expected[rows // 2 :]), name
