"""SGLang 0.5.23's weight table for the family DeepSeek-V3 (`sglang.srt.models.deepseek_v2`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slimx.extras.families.sigmoid_router import engine_draft_rows, engine_moe_table
from slimx.layout.maps import Concat
from slimx.layout.table import Group, Row, Table
from slimx.models import engine_rows
from slimx.models.fields import HfConfig
from slimx.models.rows import Layer


def engine_table(
    hf: HfConfig,
    *,
    fused_shared_experts: bool = False,
    gate_dtype: str | None = None,
    more_attention: Callable[[Layer], tuple[Row, ...]] = lambda _: (),
) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang's model, without its draft model.

    `fused_shared_experts`: True if SGLang stores the shared expert after the routed ones in the same parameters.
    `gate_dtype`: dtype of the router's weight; None: the model's dtype. `more_attention`: function that returns further
    rows of each layer's attention."""
    layer = engine_rows.layer()
    attention = (*_attention(hf, layer), *more_attention(layer))
    return engine_moe_table(hf, attention, fused=fused_shared_experts, gate_dtype=gate_dtype)


def draft_rows(hf: HfConfig, *, fused_shared_experts: bool = False) -> tuple[Row, ...]:
    """Returns the weight-table rows of the multi-token prediction layer in SGLang's draft model
    (`sglang.srt.models.deepseek_nextn`). `fused_shared_experts`: True if SGLang stores the shared expert after the
    routed ones in the same parameters."""
    return engine_draft_rows(hf, partial(_attention, hf), fused=fused_shared_experts)


def _attention(hf: HfConfig, layer: Layer) -> tuple[Row, ...]:
    """Returns the weight-table rows of latent attention and of the norms around it. The down projections of query and
    key-value are fused into one parameter, unless queries have no low-rank projection."""
    hidden = hf["hidden_size"]
    heads = hf["num_attention_heads"]
    query = hf["q_lora_rank"]
    latent = hf["kv_lora_rank"]
    rope = hf["qk_rope_head_dim"]
    nope = hf["qk_nope_head_dim"]
    value = hf["v_head_dim"]

    def linear(name: str, shape: tuple[int, int], axis: int | None, group: Group | None) -> Row:
        return engine_rows.same(layer, f"self_attn.{name}", *shape, axis=axis, group=group, quantized=True)

    wide = heads * (nope + rope)
    down = [("self_attn.kv_a_proj_with_mqa", (latent + rope, hidden))]
    queries: tuple[Row, ...]
    if query is None:
        queries = (
            linear("q_proj", (wide, hidden), 0, "attention"),
            linear("kv_a_proj_with_mqa", (latent + rope, hidden), None, None),
        )
    else:
        down = [("self_attn.q_a_proj", (query, hidden)), *down]
        queries = (
            layer.row("self_attn.fused_qkv_a_proj_with_mqa.weight", down, map=Concat(), quantized=True),
            engine_rows.same(layer, "self_attn.q_a_layernorm", query),
            linear("q_b_proj", (wide, query), 0, "attention"),
        )
    return (
        engine_rows.same(layer, "input_layernorm", hidden),
        *queries,
        engine_rows.same(layer, "self_attn.kv_a_layernorm", latent),
        linear("kv_b_proj", (heads * (nope + value), latent), 0, "attention"),
        linear("o_proj", (hidden, heads * value), 1, "attention"),
        engine_rows.same(layer, "post_attention_layernorm", hidden),
    )
