"""Ling-2 and Ring-2 (mini, flash and 1T): GLM-4.5 with its experts in groups, under names of its own and with query,
key and value in one tensor (Ling 2.0, 2510.22115)."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

from slimx.errors import SlimxError
from slimx.extras.families import glm4_moe
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.layout.maps import Fused
from slimx.layout.table import Row, Table
from slimx.models import decoder
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.fields import Fields
from slimx.models.rows import Attention

ARCHITECTURE = "BailingMoeV2ForCausalLM"
ENGINE_ARGUMENTS = {"trust_remote_code": True}
"""Neither transformers nor SGLang 0.5.23 knows config.json's model_type: engines read it by the checkpoint's code."""
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
"""GLM-4.5's names -> those of the same tensors here, in checkpoints and in SGLang."""


def transformer_config(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    return glm4_moe.transformer_config(_glm(hf))


def gpt_arguments(hf: Fields) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec."""
    return {**decoder.gpt_arguments(hf), "rotary_percent": decoder.rotating_share(hf, Attention.of(hf).head)}


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    for key in ("max_window_layers", "mtp_loss_scaling_factor"):
        hf.get(key)  # read: layers have no windows, and a run has a key of its own for the weight of that loss
    other = decoder.unusual(
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
    return other or decoder.contradicting_share(hf, Attention.of(hf).head) or glm4_moe.unsupported(_glm(hf))


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor, for a model with `mtp` layers of multi-token prediction; those
    that the checkpoint declares beyond are frozen."""
    trained, whole = (_own(glm4_moe.weight_table(_glm(hf), layers)) for layers in (mtp, mtp_layers(hf)))
    held = trained.checkpoint_shapes()
    # Those layers have neither an embedding nor an output layer of their own, of which GLM-4.5's may store copies.
    frozen = {name: shape for name, shape in whole.checkpoint_shapes().items() if name not in held}
    return replace(trained, frozen=frozen)


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.bailing_moe`), which never fuses the shared
    expert with the others; its router weighs in fp32.

    Raises SlimxError for a config.json without the fields of the published ones: SGLang would serve another model."""
    for key in ("moe_router_enable_expert_bias", "router_dtype", "use_qk_norm"):
        if hf.get(key) is None:
            raise SlimxError(
                f"{ARCHITECTURE} without {key}: SGLang 0.5.23 would serve another model; write it into config.json "
                "(moe_router_enable_expert_bias and use_qk_norm true, router_dtype fp32)",
                code="model.served_field",
                about=key,
            )
    return _own(glm4_moe.engine_table(_glm(hf)))


def _glm(hf: Fields) -> ChainMap[str, Any]:
    """`hf` with the fields that GLM-4.5's config.json has."""
    return ChainMap(hf, {theirs: hf[name] for theirs, name in _FIELDS.items()}, {"use_qk_norm": True})


def _own(table: Table) -> Table:
    return replace(table, rows=tuple(map(_renamed, table.rows)), aliases={}, frozen={})


def _renamed(row: Row) -> Row:
    sources = tuple((_name(name), shape) for name, shape in row.sources)
    if ".self_attn.q_proj." in row.sources[0][0]:
        heads = tuple(rows for _, (rows, _) in sources)
        ((name, (_, hidden)), *_) = sources
        return replace(row, name=_name(row.name), sources=((name, (sum(heads), hidden)),), map=Fused(row.map, heads))
    return replace(row, name=_name(row.name), sources=sources)


def _name(name: str) -> str:
    for theirs, own in _NAMES.items():
        name = name.replace(theirs, own)
    return name
