"""Family MiniMax-M2, M2.1, M2.5 and M2.7: grouped-query attention with rotary embeddings in part of each head and norms
over all heads together, and experts with a sigmoid router in every layer.

config.json declares multi-token prediction layers (num_mtp_modules), but no published checkpoint contains them."""

from __future__ import annotations

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.maps import Concat
from slimx.layout.table import Row, Table
from slimx.models import decoder, engine_rows
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention, Layer, embedding, head

ARCHITECTURE = "MiniMaxM2ForCausalLM"

_MOE = "block_sparse_moe"


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return {
        **decoder.decoder_fields(hf, _attention(hf)),
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return {**decoder.gpt_arguments(hf), "rotary_percent": decoder.rotary_dim_fraction(hf, _attention(hf).head)}


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    problem = decoder.scaled_otherwise(hf, "default") or decoder.contradicting_fractions(hf, _attention(hf).head)
    if problem:
        return problem
    if set(hf.get("attn_type_list") or [1]) != {1}:
        return "attn_type_list with layers of linear attention"
    if hf["num_experts_per_tok"] == 1:
        return "num_experts_per_tok 1"  # megatron-core renormalizes router weights only if several experts are selected
    return decoder.quantized_otherwise(hf) or decoder.unsupported_field(
        hf,
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("norm_topk_prob", True),
        ("shared_intermediate_size", 0),
        ("hidden_act", "silu"),
        ("tie_word_embeddings", False),
    )


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because no published checkpoint contains multi-token prediction layers."""
    hidden = hf["hidden_size"]
    inner = hf["intermediate_size"]
    experts = hf["num_local_experts"]
    layer = Layer()
    expert = f"{_MOE}.experts.{{expert}}"
    rows = (
        embedding(hf),
        *layer.attention(_attention(hf)),
        layer.norm("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden),
        layer.row("mlp.router.weight", [(f"{_MOE}.gate", (experts, hidden))]),
        _selection(layer, "mlp.router.expert_bias", experts),
        layer.row(
            "mlp.experts.linear_fc1.weight{expert}",
            [(f"{expert}.{kind}", (inner, hidden)) for kind in ("w1", "w3")],
            map=Concat(),
            axis=0,
            quantized=True,
        ),
        layer.linear("mlp.experts.linear_fc2.weight{expert}", f"{expert}.w2", (hidden, inner), axis=1),
        *head(hf),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.minimax_m2`), which has an fp32 router. `fused_shared_experts` is ignored, because the family
    has no shared experts.

    Raises SlimxError if config.json lacks a field of the published files whose default in SGLang would result in a
    different model.
    """
    for key in ("use_qk_norm", "use_routing_bias", "scoring_func", "rotary_dim"):
        if hf.get(key) is None:
            raise SlimxError(
                f"config.json of this {ARCHITECTURE} lacks {key}, and the default of SGLang 0.5.23 would give wrong "
                f"results; copy {key} from the published config.json (true for use_qk_norm and use_routing_bias, "
                '"sigmoid" for scoring_func)',
                code="model.served_field",
                about=key,
            )
    hidden = hf["hidden_size"]
    inner = hf["intermediate_size"]
    experts = hf["num_local_experts"]
    layer = engine_rows.layer()
    expert = f"{_MOE}.experts.{{expert}}"
    rows = (
        engine_rows.embedding(hf),
        *engine_rows.attention(layer, _attention(hf)),
        engine_rows.same(layer, f"{_MOE}.gate", experts, hidden, dtype="float32"),
        _selection(layer, f"{_MOE}.e_score_correction_bias", experts),
        layer.row(
            f"{_MOE}.experts.w13_weight",
            [(f"{expert}.{kind}", (inner, hidden)) for kind in ("w1", "w3")],
            map=Concat(),
            axis=0,
            quantized=True,
        ),
        layer.row(f"{_MOE}.experts.w2_weight", [(f"{expert}.w2", (hidden, inner))], axis=1, quantized=True),
        *engine_rows.head(hf),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)


def _selection(layer: Layer, name: str, experts: int) -> Row:
    """Returns the weight-table row of parameter `name`, the router's bias that is used only to select experts."""
    return layer.row(name, [(_MOE, (experts,))], kind="e_score_correction_bias", dtype="float32")


def _attention(hf: HfConfig) -> Attention:
    return Attention.of(hf, projection_norm=True)
