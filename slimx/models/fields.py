"""Tracks which fields of a config.json a family reads. A field that is not read, but could change what the model
computes, is refused by name instead of being silently ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, override

from slimx.json_types import Json

type HfConfig = Mapping[str, Any]
"""Contents of a config.json, or of an object nested in it."""

WITHOUT_MEANING = frozenset(
    {
        # names and versions
        *("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "tokenizer_class"),
        *("dtype", "torch_dtype"),  # dtypes of tensors are read from the checkpoint files
        # special tokens, which tokenizer and sampling parameters define
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        # outputs of transformers' classes
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("problem_type", "id2label", "label2id"),
        # initialization, unused at training from a checkpoint, and auxiliary losses, which the run's configuration sets
        *("initializer_range", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp"),
        # fields of older transformers versions, and of images, which the text model does not process
        *("tf_legacy_loss", "torchscript", "use_bfloat16"),
        *("ignore_index", "use_unified_vision_chunk", "video_placeholder"),
        # multi-token prediction layers, which MiniMax-M2 declares but no published checkpoint contains
        *("num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
    }
)
"""Fields of config.json that never change what a model computes."""
_READ_ELSEWHERE = ("quantization_config", "vision_config")
"""Objects in config.json whose nested fields a family need not read: checkpoint readers read quantization_config, and
families check vision_config."""
_MAY_BE_NULL = ("q_lora_rank",)
"""Fields for which null means something other than a missing field."""
_NEUTRAL: dict[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "attention_dropout": 0,
    "chunk_size_feed_forward": 0,
    "embedding_dropout": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "norm_head": False,
    "num_nextn_predict_layers": 0,
    "output_dropout": 0,
    "partial_rotary_factor": 1,
    "pruned_heads": {},
    "router_jitter_noise": 0,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
"""Field -> the value with which it has no effect. A family need not read a field that has this value or is null."""


def without_quantization(hf: HfConfig) -> Json:
    """Returns a copy of config.json `hf` without `quantization_config`, both at the top level and in nested objects.
    The copy describes the same model stored unquantized."""
    plain = {}
    for key, value in hf.items():
        if key != "quantization_config":
            plain[key] = without_quantization(value) if isinstance(value, dict) else value
    return plain


class TrackedFields(dict[str, Any]):
    """JSON object that records which of its fields, including those of nested objects, are read. A null field counts as
    missing, except those in `_MAY_BE_NULL`.

    Reads from a copy (`{**fields}`) are not recorded: fields read only there count as unread."""

    def __init__(self, content: HfConfig):
        super().__init__()
        for key, value in content.items():
            if value is not None or key in _MAY_BE_NULL:
                self[key] = TrackedFields(value) if isinstance(value, dict) else value
        self._read: set[str] = set()

    @override
    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    @override
    def get(self, key: str, default: object = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def unread(self) -> Iterator[str]:
        """Yields the names of unread fields that could change what the model computes, in file order. The name of a
        nested field is prefixed with its object's name, as in `rope_scaling.factor`."""
        for key, value in self.items():
            if value is None or key in WITHOUT_MEANING:
                continue
            if key not in self._read:
                if not self._neutral(key, value):
                    yield key
            elif isinstance(value, TrackedFields) and key not in _READ_ELSEWHERE:
                yield from (f"{key}.{inner}" for inner in value.unread())

    def _neutral(self, key: str, value: object) -> bool:
        if key in _NEUTRAL:
            return value == _NEUTRAL[key]
        return key in _REDUNDANT_IF and _REDUNDANT_IF[key](value, dict(self))


def _repeats(value: object, hf: Json, name: str) -> bool:
    """Returns True if `value` equals the value of field `name`, which is looked up in `rope_parameters`, then in
    `rope_scaling`, then at the top level of `hf`."""
    for fields in (hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}, hf):
        other = dict.get(fields, name)  # does not record a read
        if other is not None:
            return other == value
    return value is None


_REDUNDANT_IF: dict[str, Callable[[Any, Json], bool]] = {
    "layer_types": lambda value, hf: set(value) == {"full_attention"},
    "sliding_window": lambda value, hf: hf.get("use_sliding_window") is False,
    "max_window_layers": lambda value, hf: hf.get("use_sliding_window") is False,
    # fields that repeat another field
    "experts_per_token": lambda value, hf: _repeats(value, hf, "num_experts_per_tok"),
    "initial_context_length": lambda value, hf: _repeats(value, hf, "original_max_position_embeddings"),
    "rope_theta": lambda value, hf: _repeats(value, hf, "rope_theta"),
}
"""Field -> function (value, contents of config.json) that returns True if the value has no effect and a family
therefore need not read the field."""
