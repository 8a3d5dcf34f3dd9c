"""Types and bounds of config.json fields, for all families. A field with an invalid value is refused by name when the
file is read. Bounds are far above the values of published models, but low enough that no plan takes long to compute."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.models.fields import HfConfig
from slimx.models.files.index import read_object


@dataclass(frozen=True, slots=True)
class Kind:
    """Valid values of a config.json field: `accepts` returns True for a valid value, and `description` describes valid
    values in error messages."""

    description: str
    accepts: Callable[[object], bool]
    nullable: bool = True
    """True if null is valid and counts as a missing field."""


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _integer(least: int, most: int) -> Kind:
    return Kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _even(least: int, most: int) -> Kind:
    return Kind(
        f"an even number from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most and value % 2 == 0,
    )


def _number(least: float, most: float) -> Kind:
    # This also refuses NaN, because each comparison with it is false.
    return Kind(f"a number from {least:g} to {most:g}", lambda value: _is_number(value) and least <= value <= most)


def _list(kind: Kind, most: int) -> Kind:
    return Kind(
        f"a list of at most {most} entries, each {kind.description}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.accepts, value)),
    )


def _pair(kind: Kind) -> Kind:
    return Kind(
        f"a list of two entries, each {kind.description}",
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(kind.accepts, value)),
    )


_LAYERS = 1000
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_DECIDED = Kind(_FLAG.description, _FLAG.accepts, nullable=False)
"""Boolean field that must not be null: slimx treats null as a missing field, which means true, but transformers treats
null as false."""
_NAME = Kind("a string", lambda value: isinstance(value, str))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_OBJECTS = Kind(
    "an object of objects", lambda value: isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
)
_LIMIT = Kind(  # JSON has no infinity, so transformers writes {"__float__": "Infinity"}
    "a number or Infinity",
    lambda value: (_is_number(value) and value == value) or value == {"__float__": "Infinity"},
)
_SIZE = _integer(1, 2**18)
_HEADS = _integer(1, 4096)
_HEAD = _integer(1, 8192)
_EXPERTS = _integer(0, 4096)
_TOKENS = _integer(1, 2**27)
_BASE = _number(1, 1e12)
_FRACTION = _number(0.01, 1)

Schema = Mapping[str, "Kind | Schema"]
_ROTARY: Schema = {
    **dict.fromkeys(("type", "rope_type"), _NAME),
    "rope_theta": _BASE,
    "partial_rotary_factor": _FRACTION,
    "factor": _number(1, 1e4),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), _number(0, 1e4)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _number(0, 1e4)),
    "original_max_position_embeddings": _TOKENS,
    "truncate": _DECIDED,
    "mrope_interleaved": _FLAG,
    "mrope_section": _list(_HEAD, 4),
}
_QUANTIZATION: Schema = {
    **dict.fromkeys(("quant_method", "format", "fmt", "scale_fmt", "activation_scheme"), _NAME),
    "weight_block_size": _pair(_SIZE),
    "config_groups": _OBJECTS,
}
_VISION: Schema = {
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "out_hidden_size",
            "num_position_embeddings",
            "vt_hidden_size",
            "vt_intermediate_size",
            "mm_hidden_size",
        ),
        _SIZE,
    ),
    **dict.fromkeys(("num_heads", "in_channels", "spatial_merge_size", "temporal_patch_size"), _HEADS),
    "depth": _integer(0, _LAYERS),
    "deepstack_visual_indexes": _list(_integer(0, _LAYERS), _LAYERS),
    **dict.fromkeys(("patch_size", "init_pos_emb_height", "init_pos_emb_width"), _HEAD),
    "merge_kernel_size": _pair(_HEAD),
    "vt_num_hidden_layers": _integer(0, _LAYERS),
}
_TEXT: Schema = {
    "vocab_size": _integer(1, 2**24),
    "max_position_embeddings": _TOKENS,
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), _SIZE),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), _SIZE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window"), _SIZE),
    "shared_intermediate_size": _integer(0, 2**18),
    "num_hidden_layers": _integer(1, _LAYERS),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_rope_head_dim"), _even(2, 8192)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_head_dim", "v_head_dim"), _HEAD),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "norm_eps"), _number(1e-20, 0.1)),
    "rope_theta": _BASE,
    "partial_rotary_factor": _FRACTION,
    "rope_parameters": _ROTARY,
    "rope_scaling": _ROTARY,
    # experts and their router
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token"), _integer(1, 1024)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), _integer(0, 64)),
    **dict.fromkeys(("n_group", "topk_group"), _integer(1, 4096)),
    "routed_scaling_factor": _number(1e-3, 1e3),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers"), _integer(0, _LAYERS)),
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step", "full_attention_interval"), _integer(1, _LAYERS)),
    "mlp_only_layers": _list(_integer(0, _LAYERS), _LAYERS),
    "swiglu_limit": _number(1e-3, 1e4),
    "swiglu_alpha": _number(1e-3, 1e3),
    # delta nets, Mamba-2, sparse attention, multi-token prediction
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "n_groups"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size"), _HEAD),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel"), _integer(1, 64)),
    "time_step_limit": _pair(_LIMIT),
    "index_n_heads": _HEADS,
    "index_head_dim": _even(2, 8192),
    "index_topk": _TOKENS,
    "index_topk_freq": _integer(1, _LAYERS),
    **dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), _integer(0, 64)),
    # kinds of layers
    **dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type"), _list(_NAME, _LAYERS)),
    "attn_type_list": _list(_integer(0, 64), _LAYERS),
    "hybrid_override_pattern": Kind(
        f"a string of 1 to {_LAYERS} characters", lambda value: isinstance(value, str) and 1 <= len(value) <= _LAYERS
    ),
    "index_topk_pattern": Kind(
        "a string or a list of strings", lambda value: isinstance(value, str) or _list(_NAME, _LAYERS).accepts(value)
    ),
    # switches
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "mamba_proj_bias"), _FLAG),
    **dict.fromkeys(("tie_word_embeddings", "use_qk_norm", "use_rmsnorm", "use_mrope"), _FLAG),
    **dict.fromkeys(("use_sliding_window", "attn_output_gate", "moe_router_enable_expert_bias"), _FLAG),
    **dict.fromkeys(("mtp_use_dedicated_embeddings", "use_conv_bias", "residual_in_fp32"), _FLAG),
    **dict.fromkeys(("indexer_rope_interleave", "use_routing_bias"), _FLAG),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave"), _DECIDED),
    "quantization_config": _QUANTIZATION,
}
FIELDS: Schema = {**_TEXT, "text_config": _TEXT, "vision_config": _VISION}
"""Field of config.json -> its valid values, or the fields of a nested object."""


def read_fields(file: Path, unchecked: Collection[str] = ()) -> Json:
    """Reads `file`, a config.json, checks its fields with `check_fields`, and returns its contents."""
    hf = read_object(file)
    check_fields(hf, file, unchecked)
    return hf


def check_fields(hf: HfConfig, file: Path, unchecked: Collection[str] = ()) -> None:
    """Raises SlimxError for the first field of config.json `hf`, read from `file`, that has an invalid value. Fields in
    `unchecked` may have any value. Unknown fields are not checked."""
    hf = {name: value for name, value in hf.items() if name not in unchecked}
    problem = next(_problems(hf), None)
    if problem is not None:
        name, value, valid = problem
        raise SlimxError(
            f"{file}: {name} is {reprlib.repr(value)}, but must be {valid}; restore the file from the checkpoint's "
            "source",
            code="model.field",
            about=name,
        )


Problem = tuple[str, object, str]
"""Name of a field, its value, and a description of the valid values."""


def _problems(hf: HfConfig) -> Iterator[Problem]:
    yield from _invalid(hf, FIELDS)
    yield from _contradictions(hf)
    text = hf.get("text_config")
    if text is not None:
        for name, value, valid in _contradictions(text):
            yield f"text_config.{name}", value, valid


def _invalid(fields: HfConfig, schema: Schema) -> Iterator[Problem]:
    for name, value in fields.items():
        kind = schema.get(name)
        if isinstance(kind, Kind):
            if not kind.accepts(value) and (value is not None or not kind.nullable):
                yield name, value, kind.description
        elif kind is None or value is None:
            continue
        elif not isinstance(value, dict):
            yield name, value, _OBJECT.description
        else:
            for inner, inner_value, valid in _invalid(value, kind):
                yield f"{name}.{inner}", inner_value, valid


def _contradictions(hf: HfConfig) -> Iterator[Problem]:
    """Yields the fields whose values contradict those of other fields. Assumes that each value is valid by itself."""
    layers = hf.get("num_hidden_layers")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((name for name in names if hf.get(name) is not None), "")
    most = {
        "num_experts_per_tok": experts,
        "topk_group": "n_group",
        "first_k_dense_replace": "num_hidden_layers",
        "rotary_dim": "head_dim",
    }
    for name, bound in most.items():
        if hf.get(name) is not None and hf.get(bound) is not None and hf[name] > hf[bound]:
            yield name, hf[name], f"at most {hf[bound]}, the value of {bound}"
    divisors = {
        "num_attention_heads": "num_key_value_heads",
        "linear_num_value_heads": "linear_num_key_heads",
        "mamba_num_heads": "n_groups",
        experts: "n_group",
    }
    for name, divisor in divisors.items():
        if hf.get(name) and hf.get(divisor) and hf[name] % hf[divisor]:
            yield name, hf[name], f"a multiple of {hf[divisor]}, the value of {divisor}"
    for name in ("layer_types", "mlp_layer_types", "indexer_types", "attn_type_list"):
        if hf.get(name) and layers is not None and len(hf[name]) != layers:
            yield "num_hidden_layers", layers, f"{len(hf[name])}, the number of entries in {name}"
    yield from _rotation(hf)


def _rotation(hf: HfConfig) -> Iterator[Problem]:
    """Yields the fields that would make the number of rotated dimensions per head odd or out of range; dimensions are
    rotated in pairs."""
    hidden = hf.get("hidden_size")
    heads = hf.get("num_attention_heads")
    head = hf.get("head_dim")
    if hf.get("qk_rope_head_dim") is not None or hidden is None or heads is None:
        return
    if head is None and hidden % (2 * heads):
        yield "hidden_size", hidden, f"a multiple of twice num_attention_heads ({heads}) if head_dim is missing"
        return
    head = hidden // heads if head is None else head
    for prefix, fields in (("", hf), ("rope_parameters.", hf.get("rope_parameters") or {})):
        fraction = fields.get("partial_rotary_factor")
        if fraction is None:
            continue
        rotated = int(head * fraction)
        if rotated % 2 or not 2 <= rotated <= head:
            yield (
                f"{prefix}partial_rotary_factor",
                fraction,
                f"a fraction that rotates an even number of a head's {head} dimensions",
            )
