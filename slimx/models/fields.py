"""Records which fields of a config.json a family reads: one that nobody reads, and that could change what the model
computes, is refused by its name and never half understood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, override

WITHOUT_MEANING = frozenset(
    {
        # names and versions
        *("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "tokenizer_class"),
        *("dtype", "torch_dtype"),  # the files say how tensors are stored
        # tokens, which text and sampling know
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        # what transformers answers, and how
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("problem_type", "id2label", "label2id"),
        # how weights began, and auxiliary losses, which a run has keys of its own for
        *("initializer_range", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp"),
        # of an older transformers, and of pictures, which a model's text knows nothing of
        *("tf_legacy_loss", "torchscript", "use_bfloat16"),
        *("ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder"),
        # layers of multi-token prediction that MiniMax-M2 only declares: no published file has their tensors
        *("num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
    }
)
"""Fields that change nothing that a model computes, whatever their value."""
_READ_ELSEWHERE = ("quantization_config", "vision_config")
"""Objects whose fields the readers of the files know, and those of a tower that is carried over."""
_MAY_BE_NULL = ("q_lora_rank",)
"""Fields in which null says something else than a missing field does."""
_NEUTRAL: dict[str, Any] = {
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
"""Field -> the value with which it changes nothing. A field that is null never does."""


def without_quantisation(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json `hf`, objects within it too, of the same model stored plainly."""
    return {
        key: without_quantisation(value) if isinstance(value, dict) else value
        for key, value in hf.items()
        if key != "quantization_config"
    }


class Fields(dict[str, Any]):
    """A JSON object that records the names under which it is read; the objects within it do too. A field that is null
    counts as missing.

    A copy (`{**fields}`) records nothing: what is read of it alone counts as unread."""

    def __init__(self, content: Mapping[str, Any]):
        super().__init__(
            {
                key: Fields(value) if isinstance(value, dict) else value
                for key, value in content.items()
                if value is not None or key in _MAY_BE_NULL
            }
        )
        self._read: set[str] = set()

    @override
    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def unread(self) -> Iterator[str]:
        """Names of the fields that were not read and could change what is computed, in the file's order; one of an
        object within as `rope_scaling.factor`."""
        for key, value in self.items():
            if value is None or key in WITHOUT_MEANING:
                continue
            if key not in self._read:
                if not self._neutral(key, value):
                    yield key
            elif isinstance(value, Fields) and key not in _READ_ELSEWHERE:
                yield from (f"{key}.{inner}" for inner in value.unread())

    def _neutral(self, key: str, value: Any) -> bool:
        if key in _NEUTRAL:
            return value == _NEUTRAL[key]
        return key in _IN_THE_LIGHT_OF and _IN_THE_LIGHT_OF[key](value, dict(self))


def _repeats(value: Any, hf: dict[str, Any], name: str) -> bool:
    """Returns True if field `name`, of the rotary objects or beside them, has the same `value`."""
    places = [hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}, hf]
    found = (dict.get(place, name) for place in places)  # which records nothing
    return next((other for other in found if other is not None), None) == value


_IN_THE_LIGHT_OF: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "layer_types": lambda value, hf: set(value) == {"full_attention"},
    "sliding_window": lambda value, hf: hf.get("use_sliding_window") is False,
    "max_window_layers": lambda value, hf: hf.get("use_sliding_window") is False,
    # said twice
    "experts_per_token": lambda value, hf: _repeats(value, hf, "num_experts_per_tok"),
    "initial_context_length": lambda value, hf: _repeats(value, hf, "original_max_position_embeddings"),
    "rope_theta": lambda value, hf: _repeats(value, hf, "rope_theta"),
}
"""Field -> True if its value changes nothing in a config.json with such other fields."""
