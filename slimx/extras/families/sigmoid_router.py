"""The router that DeepSeek-V3 brought (2412.19437, 2.1.2) and GLM-4.5 took over, under the same names in config.json:
sigmoid scores, a bias that only chooses, experts in groups, shared experts, dense first layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimx.errors import SlimxError
from slimx.layout.engine import DRAFT
from slimx.layout.table import Row, Table
from slimx.models import engine_rows
from slimx.models.fields import Fields
from slimx.models.rows import Layer


def moe_fields(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig for the experts, their router and their places."""
    layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    return {
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": _sizes(hf)["shared"] or None,
        **router_fields(hf),
    }


def router_fields(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig for routed experts and their router."""
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


def moe_rows(hf: Fields, at: Layer) -> tuple[Row, ...]:
    """The trainer's rows of a MoE layer, the norm before it included."""
    return at.moe(**_sizes(hf), selection=True)


def engine_moe_table(hf: Fields, attention: tuple[Row, ...], *, fused: bool, gate_dtype: str | None = None) -> Table:
    """SGLang's layout of a model with these rows of `attention`, dense first layers, and such a router with its experts
    in the others. `fused`: the shared expert stands after the routed ones in the same tensors; `gate_dtype`: of the
    router's weight, where that is not the model's."""
    if fused and (shared := hf.get("n_shared_experts")) != 1:
        raise SlimxError(
            f"SGLang fuses one shared expert with the others, this model has {shared}; do not fuse them",
            code="model.fused_shared_experts",
            about="n_shared_experts",
        )
    layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    first, rest = engine_rows.layer(range(dense)), engine_rows.layer(range(dense, layers))
    rows = (
        engine_rows.embedding(hf),
        *attention,
        *(engine_rows.swiglu(first, "mlp", hf["hidden_size"], hf["intermediate_size"]) if dense else ()),
        *engine_rows.moe(rest, **_sizes(hf), fused=fused, selection=True, gate_dtype=gate_dtype),
        *engine_rows.head(hf),
    )
    return Table(rows, layers=layers, experts=hf["n_routed_experts"])


def engine_draft_rows(
    hf: Fields,
    attention: Callable[[Layer], tuple[Row, ...]],
    *,
    fused: bool,
    gate_dtype: str | None = None,
) -> tuple[Row, ...]:
    """SGLang's layout of a layer of multi-token prediction with this `attention` and such a router: the decoder layer
    of a draft model, whose embedding and output layer are the target's. `fused`, `gate_dtype` as of
    `engine_moe_table`."""
    at = Layer(f"{DRAFT}model.", engine_rows.LAYER, stage="mtp")
    inside, hidden = Layer(f"{at.here}decoder.", at.there, stage=at.stage), hf["hidden_size"]
    return (
        *(engine_rows.same(at, norm, hidden) for norm in ("enorm", "hnorm")),
        engine_rows.same(at, "eh_proj", hidden, 2 * hidden),
        *attention(inside),
        *engine_rows.moe(inside, **_sizes(hf), fused=fused, selection=True, gate_dtype=gate_dtype),
        engine_rows.same(at, "shared_head.norm", hidden),
    )


def _sizes(hf: Fields) -> dict[str, int]:
    """`shared`: inner size of the shared experts together; 0 without any."""
    inner = hf["moe_intermediate_size"]
    shared = (hf.get("n_shared_experts") or 0) * inner
    return {"hidden": hf["hidden_size"], "inner": inner, "experts": hf["n_routed_experts"], "shared": shared}


def unsupported_router(hf: Fields) -> str | None:
    """Name the part of the router that cannot be built; None if all can."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if hf.get(key, only) != only:
            return f"{key} {hf[key]}"
    chosen = hf["num_experts_per_tok"]
    # Megatron normalises the weights of the chosen experts if there are several.
    if hf.get("norm_topk_prob", True) != (chosen > 1):
        return f"norm_topk_prob {str(hf.get('norm_topk_prob', True)).lower()} and num_experts_per_tok {chosen}"
    # The checkpoint's router rates a group by its best two experts, Megatron's by its best topk // group_topk.
    if _grouped(hf) and chosen // hf["topk_group"] != 2:
        return f"num_experts_per_tok {chosen} in topk_group {hf['topk_group']} groups, which is not two of each,"
    return None


def unsupported_places(hf: Fields) -> str | None:
    """Name the list of MoE layers if it is not what `first_k_dense_replace` says: transformers builds the layers that
    the list names, SGLang those after the first ones."""
    layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    if hf.get("mlp_layer_types") not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)):
        return f"mlp_layer_types other than {dense} dense layers and then sparse ones (first_k_dense_replace)"
    return None


def _grouped(hf: Fields) -> bool:
    """Returns True if the choice of groups excludes any expert."""
    return (hf.get("n_group") or 1) > (hf.get("topk_group") or 1)
