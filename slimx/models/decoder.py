"""Helpers that most decoder families share: translate config.json to arguments of megatron-core's TransformerConfig and
GPTModel, and build the weight tables of dense decoders like Llama."""

from __future__ import annotations

from collections import ChainMap

from slimx.json_types import Json
from slimx.layout.number_formats import all_formats
from slimx.layout.table import Group, Table
from slimx.models import engine_rows
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import ATTENTION_ONLY, LayerKind
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies


def decoder_fields(hf: HfConfig, attention: Attention) -> Json:
    """Returns megatron-core's TransformerConfig fields for a decoder with grouped-query attention, RMSNorm and gated
    MLPs without biases."""
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


def mtp_layers(hf: HfConfig) -> int:
    """Returns 0: most families have no multi-token prediction layers. Such families use this function as their
    `mtp_layers`."""
    return 0


def layer_kind(hf: HfConfig) -> LayerKind:
    """Returns the layer kind of most families, with attention in every layer. Such families use this function as their
    `layer_kind`."""
    return ATTENTION_ONLY


def rotary(hf: HfConfig) -> tuple[str, HfConfig]:
    """Returns the type of the rotary embedding ("default" if it is not scaled) and its fields. Reads the current fields
    of transformers (`rope_parameters`) as well as the older ones of most checkpoints (`rope_theta` and
    `rope_scaling`)."""
    fields = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    types = [name for name in (fields.get("rope_type"), fields.get("type")) if name]
    kind = " and ".join(dict.fromkeys(types)) or "default"
    if "rope_theta" in fields:
        return kind, fields
    return kind, ChainMap(fields, {"rope_theta": hf["rope_theta"]})


def scaled_otherwise(hf: HfConfig, *kinds: str) -> str | None:
    """Returns, for an error message, a description of the rotary scaling if its type is not one of the supported
    `kinds`; otherwise None. Unscaled embeddings have the type "default"."""
    kind, _ = rotary(hf)
    if kind in kinds:
        return None
    field = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    return f"{field} of type {kind}"


def rotary_fraction(hf: HfConfig, *, default: float) -> float:
    """Returns the fraction of each head's dimensions that the rotary embedding rotates (`partial_rotary_factor`), or
    `default` if config.json does not set it."""
    fraction = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return default if fraction is None else fraction


def rotary_dim_fraction(hf: HfConfig, head: int) -> float:
    """Returns the fraction of each head's dimensions that the rotary embedding rotates, for families whose config.json
    may set either this fraction (`partial_rotary_factor`) or the number of rotated dimensions (`rotary_dim`); 1.0 if it
    sets neither. `head`: number of dimensions of a head."""
    dimensions = hf.get("rotary_dim")
    if dimensions is None:
        return rotary_fraction(hf, default=1.0)
    return dimensions / head


def contradicting_fractions(hf: HfConfig, head: int) -> str | None:
    """Returns, for an error message, a description of `partial_rotary_factor` and `rotary_dim` if config.json sets both
    and they disagree; otherwise None. `head`: number of dimensions of a head."""
    by_dimensions = rotary_dim_fraction(hf, head)
    fraction = rotary_fraction(hf, default=by_dimensions)
    if fraction != by_dimensions:
        return f"partial_rotary_factor {fraction} and rotary_dim {hf['rotary_dim']}"
    return None


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec, for a
    model with unscaled rotary embeddings."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rotary(hf)[1]["rope_theta"],
        "share_embeddings_and_output_weights": hf.get("tie_word_embeddings", False),
    }


def quantized_otherwise(hf: HfConfig, *methods: str) -> str | None:
    """Returns, for an error message, a description of the checkpoint's quantization if its `quant_method` is not one of
    `methods` or its scheme is not supported; otherwise None. `methods`: names in `all_formats()`; by default block fp8
    ("fp8") and INT4 ("compressed-tensors")."""
    quantization = hf.get("quantization_config")
    if not quantization:
        return None
    supported = methods or ("fp8", "compressed-tensors")
    method = quantization.get("quant_method", supported[0])
    if method not in supported:
        return f"quantization_config.quant_method {method}"
    return all_formats()[method].other_scheme(quantization)


def unsupported_field(hf: HfConfig, *only: tuple[str, object]) -> str | None:
    """Returns, for an error message, the name and value of the first field that config.json sets to an unsupported
    value; None if there is no such field. `only`: pairs of a field and its only supported value. A missing or null
    field counts as supported."""
    for key, value in only:
        if hf.get(key) not in (None, value):
            return f"{key} {hf[key]}"
    return None


def dense_table(hf: HfConfig, attention: Attention) -> Table:
    """Returns the trainer's weight table for a dense decoder like Llama: for each of megatron-core's parameters, the
    checkpoint tensors that it contains."""
    layer = Layer()
    mlp = layer.dense(hf["hidden_size"], hf["intermediate_size"])
    rows = (embedding(hf), *layer.attention(attention), *mlp, *head(hf))
    return Table(rows, layers=hf["num_hidden_layers"], experts=0, aliases=tied_copies(hf))


def dense_engine_table(hf: HfConfig, attention: Attention, group: Group = "attention") -> Table:
    """Returns SGLang 0.5.23's weight table for a dense decoder like Llama: for each of SGLang's parameters, the
    checkpoint tensors that it contains. `group`: group of ranks that split attention and embedding; "tensor" if
    SGLang's model does not support DP-attention."""
    layer = engine_rows.layer()
    rows = (
        engine_rows.embedding(hf, group),
        *engine_rows.attention(layer, attention, group),
        *engine_rows.swiglu(layer, "mlp", hf["hidden_size"], hf["intermediate_size"]),
        *engine_rows.head(hf, tied=hf.get("tie_word_embeddings", False)),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=0)
