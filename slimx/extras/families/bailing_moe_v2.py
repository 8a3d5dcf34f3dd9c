"""Family Ling-2 and Ring-2 (mini, flash and 1T): as GLM-4.5, but with expert groups, other tensor names, and one
checkpoint tensor for query, key and value (Ling 2.0, 2510.22115)."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import cast

from slimx.errors import SlimxError
from slimx.extras.families import glm4_moe
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.json_types import Json
from slimx.layout.maps import Fused
from slimx.layout.table import Row, Table
from slimx.models import decoder
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention

ARCHITECTURE = "BailingMoeV2ForCausalLM"
ENGINE_ARGUMENTS = {"trust_remote_code": True}
"""SGLang argument that makes engines read config.json with code from the checkpoint, because neither transformers nor
SGLang 0.5.23 supports its model_type."""
_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.q_proj.": ".attention.query_key_value.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
    ".shared_head.norm.": ".final_layernorm.",
}
"""Part of a tensor's name in GLM-4.5 -> the part that replaces it in this family's checkpoints and in SGLang."""


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return glm4_moe.transformer_config(_glm(hf))


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return {**decoder.gpt_arguments(hf), "rotary_percent": decoder.rotary_dim_fraction(hf, Attention.of(hf).head)}


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    for key in ("max_window_layers", "mtp_loss_scaling_factor"):
        hf.get(key)  # marked as read, because layers have no windows and the run's configuration sets the loss weight
    other = decoder.unsupported_field(
        hf,
        ("score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("moe_shared_expert_intermediate_size", hf["moe_intermediate_size"]),
        ("router_dtype", "fp32"),
        ("router_type", "topN"),
        ("use_bias", False),
        ("use_qkv_bias", False),
        ("use_qk_norm", True),
        ("use_rmsnorm", True),
    )
    return other or decoder.contradicting_fractions(hf, Attention.of(hf).head) or glm4_moe.unsupported(_glm(hf))


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp`: number of multi-token prediction layers to train; further layers that the checkpoint declares are
    copied unchanged to exports (`Table.frozen`)."""
    trained = _renamed_table(glm4_moe.weight_table(_glm(hf), mtp))
    complete = _renamed_table(glm4_moe.weight_table(_glm(hf), mtp_layers(hf)))
    trained_shapes = trained.checkpoint_shapes()
    # Unlike GLM-4.5's, these multi-token prediction layers have no copies of embedding and output layer.
    frozen = {name: shape for name, shape in complete.checkpoint_shapes().items() if name not in trained_shapes}
    return replace(trained, frozen=frozen)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.bailing_moe`), which has an fp32 router. `fused_shared_experts` is ignored, because the model
    never fuses the shared expert.

    Raises SlimxError if config.json lacks a field of the published files without which SGLang would serve a different
    model."""
    for key in ("moe_router_enable_expert_bias", "router_dtype", "use_qk_norm"):
        if hf.get(key) is None:
            raise SlimxError(
                f"config.json of this {ARCHITECTURE} lacks {key}, and the default of SGLang 0.5.23 would give wrong "
                f"results; add {key} to config.json with the published value (true for moe_router_enable_expert_bias "
                "and "
                'use_qk_norm, "fp32" for router_dtype)',
                code="model.served_field",
                about=key,
            )
    return _renamed_table(glm4_moe.engine_table(_glm(hf)))


def _glm(hf: HfConfig) -> HfConfig:
    """Returns config.json `hf` with fields added under the names that GLM-4.5 uses, so that GLM-4.5's functions can
    read it."""
    renamed = {glm_name: hf[name] for glm_name, name in _FIELDS.items()}
    return ChainMap(cast(Json, hf), renamed, {"use_qk_norm": True})


def _renamed_table(table: Table) -> Table:
    return replace(table, rows=tuple(map(_renamed, table.rows)), aliases={}, frozen={})


def _renamed(row: Row) -> Row:
    sources = tuple((_name(name), shape) for name, shape in row.sources)
    if ".self_attn.q_proj." in row.sources[0][0]:
        heads = tuple(rows for _, (rows, _) in sources)
        ((name, (_, hidden)), *_) = sources
        return replace(row, name=_name(row.name), sources=((name, (sum(heads), hidden)),), map=Fused(row.map, heads))
    return replace(row, name=_name(row.name), sources=sources)


def _name(name: str) -> str:
    for glm_name, new_name in _NAMES.items():
        name = name.replace(glm_name, new_name)
    return name
