"""MoE layers of DeepSeek-V3 (arXiv:2412.19437, 2.1.2), which GLM-4.5 adopted with the same names in config.json: a
router with sigmoid scores, a bias that is used only to select experts, and expert groups; shared experts; dense first
layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.engine import DRAFT
from slimx.layout.table import Row, Table
from slimx.models import engine_rows
from slimx.models.fields import HfConfig
from slimx.models.rows import Layer


def moe_fields(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig for router, routed and shared experts, including which
    layers have them."""
    layers = hf["num_hidden_layers"]
    dense = hf["first_k_dense_replace"]
    return {
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": _sizes(hf)["shared"] or None,
        **router_fields(hf),
    }


def router_fields(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig for routed experts and their router, without those for
    shared experts, which `moe_fields` adds."""
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_num_groups": hf["n_group"] if _grouped(hf) else None,
        "moe_router_group_topk": hf["topk_group"] if _grouped(hf) else None,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def moe_rows(hf: HfConfig, layer: Layer) -> tuple[Row, ...]:
    """Returns the trainer's weight-table rows of the MoE layers and of the norms before them. `layer`: factory of rows
    for the layers that have experts."""
    return layer.moe(**_sizes(hf), selection=True)


def engine_moe_table(hf: HfConfig, attention: tuple[Row, ...], *, fused: bool, gate_dtype: str | None = None) -> Table:
    """Returns SGLang's weight table of a model whose first layers are dense and whose other layers have DeepSeek-V3's
    sigmoid router and experts. `attention`: rows of all layers' attention.

    `fused`: True if SGLang stores the shared expert after the routed ones in the same parameters; `gate_dtype`: dtype
    of the router's weight; None: the model's dtype."""
    if fused and hf.get("n_shared_experts") != 1:
        raise SlimxError(
            "rollout.engines.sglang.enforce_shared_experts_fusion requires a model with exactly one shared expert, "
            f"but config.json has n_shared_experts={hf.get('n_shared_experts')}; remove "
            "rollout.engines.sglang.enforce_shared_experts_fusion",
            code="model.fused_shared_experts",
            about="n_shared_experts",
        )
    layers = hf["num_hidden_layers"]
    dense = hf["first_k_dense_replace"]
    rows = [engine_rows.embedding(hf), *attention]
    if dense:
        dense_layer = engine_rows.layer(range(dense))
        rows += engine_rows.swiglu(dense_layer, "mlp", hf["hidden_size"], hf["intermediate_size"])
    moe_layer = engine_rows.layer(range(dense, layers))
    rows += engine_rows.moe(moe_layer, **_sizes(hf), fused=fused, selection=True, gate_dtype=gate_dtype)
    rows += engine_rows.head(hf)
    return Table(tuple(rows), layers=layers, experts=hf["n_routed_experts"])


def engine_draft_rows(
    hf: HfConfig,
    attention: Callable[[Layer], tuple[Row, ...]],
    *,
    fused: bool,
    gate_dtype: str | None = None,
) -> tuple[Row, ...]:
    """Returns the weight-table rows of a multi-token prediction layer with DeepSeek-V3's sigmoid router in SGLang's
    draft model, which shares the target model's embedding and output layer. `attention`: function that returns the rows
    of a layer's attention; `fused`: True if SGLang stores the shared expert after the routed ones in the same
    parameters; `gate_dtype`: dtype of the router's weight; None: the model's dtype."""
    layer = Layer(f"{DRAFT}model.", engine_rows.LAYER, stage="mtp")
    inside = Layer(f"{layer.prefix}decoder.", layer.source_prefix, stage=layer.stage)
    hidden = hf["hidden_size"]
    return (
        engine_rows.same(layer, "enorm", hidden),
        engine_rows.same(layer, "hnorm", hidden),
        engine_rows.same(layer, "eh_proj", hidden, 2 * hidden),
        *attention(inside),
        *engine_rows.moe(inside, **_sizes(hf), fused=fused, selection=True, gate_dtype=gate_dtype),
        engine_rows.same(layer, "shared_head.norm", hidden),
    )


class _Sizes(TypedDict):
    hidden: int
    inner: int
    experts: int
    shared: int


def _sizes(hf: HfConfig) -> _Sizes:
    """Returns the sizes of an MoE layer, as keyword arguments of functions that return the layer's weight-table rows.
    Key `shared` is the total intermediate size of the shared experts; 0 if there are none."""
    inner = hf["moe_intermediate_size"]
    shared = (hf.get("n_shared_experts") or 0) * inner
    return {"hidden": hf["hidden_size"], "inner": inner, "experts": hf["n_routed_experts"], "shared": shared}


def unsupported_router(hf: HfConfig) -> str | None:
    """Returns a description of the first router setting in config.json `hf` that slimx does not support; None if all
    are supported."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if hf.get(key, only) != only:
            return f"{key} {hf[key]}"
    chosen = hf["num_experts_per_tok"]
    # megatron-core renormalizes the weights of the selected experts if there are several.
    if hf.get("norm_topk_prob", True) != (chosen > 1):
        return f"norm_topk_prob {str(hf.get('norm_topk_prob', True)).lower()} and num_experts_per_tok {chosen}"
    # The model's router scores a group by its best two experts, megatron-core's by its best topk // group_topk.
    if _grouped(hf) and chosen // hf["topk_group"] != 2:
        return (
            f"num_experts_per_tok {chosen} in topk_group {hf['topk_group']} groups, which is not two experts per group,"
        )
    return None


def unsupported_layers(hf: HfConfig) -> str | None:
    """Returns a description of `mlp_layer_types` if it contradicts `first_k_dense_replace`, else None. transformers
    builds MoE layers according to the former field, SGLang according to the latter."""
    layers = hf["num_hidden_layers"]
    dense = hf["first_k_dense_replace"]
    if hf.get("mlp_layer_types") not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)):
        return f"mlp_layer_types other than {dense} dense layers and then sparse ones (first_k_dense_replace)"
    return None


def _grouped(hf: HfConfig) -> bool:
    """Returns True if the router's group selection excludes some experts, that is, if not all expert groups are
    selected."""
    return (hf.get("n_group") or 1) > (hf.get("topk_group") or 1)
