"""Where SGLang 0.5.23 holds the tensors of a DeepSeek-V3 checkpoint (`sglang.srt.models.deepseek_v2`, and
`deepseek_nextn` for the draft model of multi-token prediction)."""

from __future__ import annotations

from typing import Any

from slimx.errors import SlimxError
from slimx.layout.maps import Concat
from slimx.layout.table import Group, Row, Sources, Stage, Table, padded_vocabulary


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """The target model. `fused_shared_experts`: the shared expert stands after the routed ones in the same tensors."""
    hidden, layers, dense = hf["hidden_size"], hf["num_hidden_layers"], hf["first_k_dense_replace"]
    layer = "model.layers.{layer}."
    rows = (
        padded_vocabulary("model.embed_tokens.weight", hf["vocab_size"], hidden, stage="first", group="attention"),
        *_attention(hf, layer, layer, "layer"),
        *_dense(hf, layer, range(dense)),
        *_moe(hf, layer, layer, "layer", range(dense, layers), fused_shared_experts),
        Row("model.norm.weight", (("model.norm.weight", (hidden,)),), stage="last"),
        padded_vocabulary("lm_head.weight", hf["vocab_size"], hidden, stage="last", group="tensor"),
    )
    return Table(rows, layers=layers, experts=hf["n_routed_experts"])


def draft_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """The draft model: the checkpoint's layer of multi-token prediction, with embedding and output of the target."""
    hidden, there = hf["hidden_size"], f"model.layers.{hf['num_hidden_layers']}."
    here = "model.decoder."
    rows = (
        padded_vocabulary("model.embed_tokens.weight", hf["vocab_size"], hidden, stage="first", group="attention"),
        Row("model.enorm.weight", ((there + "enorm.weight", (hidden,)),), stage="first"),
        Row("model.hnorm.weight", ((there + "hnorm.weight", (hidden,)),), stage="first"),
        Row("model.eh_proj.weight", ((there + "eh_proj.weight", (hidden, 2 * hidden)),), stage="first"),
        *_attention(hf, here, there, "first"),
        *_moe(hf, here, there, "first", None, fused_shared_experts),
        Row("model.shared_head.norm.weight", ((there + "shared_head.norm.weight", (hidden,)),), stage="first"),
        padded_vocabulary("lm_head.weight", hf["vocab_size"], hidden, stage="first", group="tensor"),
    )
    return Table(rows, layers=1, experts=hf["n_routed_experts"])


def _attention(hf: dict[str, Any], here: str, there: str, stage: Stage) -> tuple[Row, ...]:
    """Norms and latent attention; the first projections of query and key-value are one tensor."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    query, latent, rope = hf["q_lora_rank"], hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    nope, value = hf["qk_nope_head_dim"], hf["v_head_dim"]

    def linear(name: str, shape: tuple[int, int], axis: int | None, group: Group | None) -> Row:
        sources = ((f"{there}self_attn.{name}.weight", shape),)
        target = f"{here}self_attn.{name}.weight"
        return Row(target, sources, axis=axis, stage=stage, group=group, quantised=True)

    def norm(name: str, size: int) -> Row:
        return Row(f"{here}{name}.weight", ((f"{there}{name}.weight", (size,)),), stage=stage)

    down: tuple[tuple[str, tuple[int, int]], ...] = (
        (there + "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)),
    )
    if query is None:
        queries = (
            linear("q_proj", (heads * (nope + rope), hidden), 0, "attention"),
            linear("kv_a_proj_with_mqa", (latent + rope, hidden), None, None),
        )
    else:
        down = ((there + "self_attn.q_a_proj.weight", (query, hidden)), *down)
        fused = here + "self_attn.fused_qkv_a_proj_with_mqa.weight"
        queries = (
            Row(fused, down, Concat(), stage=stage, quantised=True),
            norm("self_attn.q_a_layernorm", query),
            linear("q_b_proj", (heads * (nope + rope), query), 0, "attention"),
        )
    return (
        norm("input_layernorm", hidden),
        *queries,
        norm("self_attn.kv_a_layernorm", latent),
        linear("kv_b_proj", (heads * (nope + value), latent), 0, "attention"),
        linear("o_proj", (hidden, heads * value), 1, "attention"),
        norm("post_attention_layernorm", hidden),
    )


def _dense(hf: dict[str, Any], at: str, layers: range) -> tuple[Row, ...]:
    if not layers:
        return ()
    return _swiglu(at + "mlp", at + "mlp", hf["hidden_size"], hf["intermediate_size"], "layer", layers)


def _moe(hf: dict[str, Any], here: str, there: str, stage: Stage, layers: range | None, fused: bool) -> tuple[Row, ...]:
    hidden, inner, experts = hf["hidden_size"], hf["moe_intermediate_size"], hf["n_routed_experts"]
    shared = hf.get("n_shared_experts") or 0
    if fused and shared != 1:
        raise SlimxError(f"SGLang fuses one shared expert with the others, this model has {shared}; do not fuse them")
    gate, experts_of = there + "mlp.gate.", there + "mlp.experts.{expert}."

    def appended(*names: str) -> tuple[Sources, ...]:
        if not fused:
            return ()
        shapes = {"down_proj": (hidden, inner)}
        sources = ((f"{there}mlp.shared_experts.{n}.weight", shapes.get(n, (inner, hidden))) for n in names)
        return (tuple(sources),)

    rows = [
        Row(here + "mlp.gate.weight", ((gate + "weight", (experts, hidden)),), stage=stage, layers=layers),
        Row(
            here + "mlp.gate.e_score_correction_bias",
            ((gate + "e_score_correction_bias", (experts,)),),
            stage=stage,
            layers=layers,
            dtype="float32",
        ),
        Row(
            here + "mlp.experts.w13_weight",
            (
                (experts_of + "gate_proj.weight", (inner, hidden)),
                (experts_of + "up_proj.weight", (inner, hidden)),
            ),
            Concat(),
            axis=0,
            stage=stage,
            layers=layers,
            quantised=True,
            appended=appended("gate_proj", "up_proj"),
        ),
        Row(
            here + "mlp.experts.w2_weight",
            ((experts_of + "down_proj.weight", (hidden, inner)),),
            axis=1,
            stage=stage,
            layers=layers,
            quantised=True,
            appended=appended("down_proj"),
        ),
    ]
    if shared and not fused:
        name = "mlp.shared_experts"
        rows += _swiglu(here + name, there + name, hidden, shared * inner, stage, layers)
    return tuple(rows)


def _swiglu(here: str, there: str, hidden: int, inner: int, stage: Stage, layers: range | None) -> tuple[Row, ...]:
    both = tuple((f"{there}.{kind}_proj.weight", (inner, hidden)) for kind in ("gate", "up"))
    down = ((there + ".down_proj.weight", (hidden, inner)),)
    return (
        Row(here + ".gate_up_proj.weight", both, Concat(), 0, stage, layers=layers, quantised=True),
        Row(here + ".down_proj.weight", down, axis=1, stage=stage, layers=layers, quantised=True),
    )
