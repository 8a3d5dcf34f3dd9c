"""Parts that most decoders have in common: fields of config.json, as arguments of megatron-core's configuration and
model, and the tables of dense ones of Llama's shape."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from slimx.layout.number_formats import all_formats
from slimx.layout.table import Group, Table
from slimx.models import engine_rows
from slimx.models.layer_kind import ATTENTION_ONLY, LayerKind
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies


def decoder_fields(hf: Mapping[str, Any], attention: Attention) -> dict[str, Any]:
    """Fields of a TransformerConfig: layers of grouped-query attention, RMS norms and gated MLPs without biases."""
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": attention.hidden,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.groups,
        "kv_channels": attention.head,
        "ffn_hidden_size": hf["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": attention.qk_norm,
        "gated_linear_unit": True,
        "add_qkv_bias": attention.qkv_bias,
        "attention_output_gate": attention.output_gate,
        "add_bias_linear": False,
    }


def mtp_layers(hf: dict[str, Any]) -> int:
    """Layers of multi-token prediction: most families have none."""
    return 0


def layer_kind(hf: dict[str, Any]) -> LayerKind:
    """The kind of layers: most families have attention in all of them."""
    return ATTENTION_ONLY


def first_of(hf: dict[str, Any], *names: str) -> Any:
    """The field that config.json has under one of `names`: the published checkpoints' first, then those that
    transformers writes now. Raises KeyError of the first if there is none."""
    return hf[next((name for name in names if name in hf), names[0])]


def rotary(hf: dict[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Type ("default": not scaled) and fields of the rotary embedding, in transformers' present form (rope_parameters)
    or the checkpoints' older one (rope_theta and rope_scaling)."""
    fields = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    named = [kind for kind in (fields.get("rope_type"), fields.get("type")) if kind]
    kind = " and ".join(dict.fromkeys(named)) or "default"
    return kind, fields if "rope_theta" in fields else ChainMap(fields, {"rope_theta": hf["rope_theta"]})


def scaled_otherwise(hf: dict[str, Any], *kinds: str) -> str | None:
    """The rotary embedding's scaling, in words, where its type is none of `kinds` ("default": not scaled)."""
    if (kind := rotary(hf)[0]) in kinds:
        return None
    return f"{'rope_parameters' if hf.get('rope_parameters') else 'rope_scaling'} of type {kind}"


def rotary_share(hf: dict[str, Any], *, default: float) -> float:
    """Share of each head that rotates, where config.json says it."""
    share = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return default if share is None else share


def rotating_share(hf: dict[str, Any], head: int) -> float:
    """Share of each `head` that rotates where config.json may also say how many of its dimensions do (rotary_dim); 1.0
    by default."""
    if (dimensions := hf.get("rotary_dim")) is not None:
        return dimensions / head
    return rotary_share(hf, default=1.0)


def contradicting_share(hf: dict[str, Any], head: int) -> str | None:
    """The share that rotates, in words, where config.json says it in both ways and they differ."""
    own = rotating_share(hf, head)
    if (share := rotary_share(hf, default=own)) != own:
        return f"partial_rotary_factor {share} and rotary_dim {hf['rotary_dim']}"
    return None


def gpt_arguments(hf: dict[str, Any]) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec, for rotary positions without
    scaling."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rotary(hf)[1]["rope_theta"],
        "share_embeddings_and_output_weights": hf.get("tie_word_embeddings", False),
    }


def quantised_otherwise(hf: Mapping[str, Any], *methods: str) -> str | None:
    """The checkpoint's quantisation where it is in none of the number formats `methods` (block fp8 and INT4 unless
    given), in words; None also if there is none."""
    described, methods = hf.get("quantization_config"), methods or ("fp8", "compressed-tensors")
    if not described:
        return None
    method = described.get("quant_method", methods[0])
    if method not in methods:
        return f"quantization_config.quant_method {method}"
    return all_formats()[method].other_scheme(described)


def unusual(hf: dict[str, Any], *only: tuple[str, Any]) -> str | None:
    """The first of the fields that config.json sets to another value than the `only` one that can be built; a field
    that is missing or null has it."""
    for key, value in only:
        if hf.get(key) not in (None, value):
            return f"{key} {hf[key]}"
    return None


def dense_table(hf: dict[str, Any], attention: Attention) -> Table:
    """The trainer's layout of every checkpoint tensor of a dense decoder of Llama's shape."""
    layer = Layer()
    mlp = layer.dense(hf["hidden_size"], hf["intermediate_size"])
    rows = (embedding(hf), *layer.attention(attention), *mlp, *head(hf))
    return Table(rows, layers=hf["num_hidden_layers"], experts=0, aliases=tied_copies(hf))


def dense_engine_table(hf: dict[str, Any], attention: Attention, group: Group = "attention") -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor of such a decoder. `group`: "tensor" where its model knows no
    DP-attention."""
    layer = engine_rows.layer()
    rows = (
        engine_rows.embedding(hf, group),
        *engine_rows.attention(layer, attention, group),
        *engine_rows.swiglu(layer, "mlp", hf["hidden_size"], hf["intermediate_size"]),
        *engine_rows.head(hf, tied=hf.get("tie_word_embeddings", False)),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=0)
