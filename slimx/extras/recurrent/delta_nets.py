"""Decoders of gated delta nets (Yang et al., 2412.06464) and attention, as a kind of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK
from slimx.models.layer_kind import LayerKind, LayerParts, mlps

FP32 = 4


@dataclass(frozen=True)
class DeltaNets(LayerKind):
    """Delta nets in the layers that `linear_attention_freq` lists, attention in the others."""

    unproven = {
        "delta nets": ("rollout.engines.role", "rollout.engines.sglang.speculative_algorithm"),
        "megatron-core's experimental attention": ("trainer.offload_activations",),
    }

    def layers(self, model: Mapping[str, Any]) -> tuple[LayerParts, ...]:
        mixers = ("recurrent" if net else "attention" for net in model["linear_attention_freq"])
        return tuple(LayerParts(mixer, mlp) for mixer, mlp in zip(mixers, mlps(model), strict=True))

    def split_rules(self) -> tuple[Any, ...]:
        from slimx.extras.recurrent.rules import shares_key_heads

        return (shares_key_heads,)

    def mixer_products(self, model: Mapping[str, Any]) -> int:
        """Counts products with weights, those of the convolution among them, and of the chunk rule (2412.06464, section
        3.3) in chunks of 64 tokens, as flash-linear-attention cuts them.

        Per value head the rule multiplies key and query with the chunk's keys and the chunk's scores with its new
        values, and three vectors with the state. Its triangular systems are left out."""
        hidden, keys = model["hidden_size"], model["linear_num_key_heads"]
        values, wide = model["linear_num_value_heads"], model["linear_value_head_dim"]
        head = model["linear_key_head_dim"]
        mixed = 2 * keys * head + values * wide
        weights = hidden * (mixed + 2 * values * wide + 2 * values) + model["linear_conv_kernel_dim"] * mixed
        return weights + values * (CHUNK * (2 * head + wide) + 3 * head * wide)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Heads are split over the tensor-parallel ranks, tokens are whole; under context parallelism a rank has fewer
        heads of more tokens, as many numbers as without. Keys and queries are repeated for the value heads that they
        serve, as megatron-core does it. Never measured."""
        if parts.mixer == "attention":
            return None
        s, head, wide = setting, model["linear_key_head_dim"], model["linear_value_head_dim"]
        heads = s.tokens * model["linear_num_value_heads"] / s.sizes.tensor  # numbers of one per token and value head
        keys = s.tokens * model["linear_num_key_heads"] * head / s.sizes.tensor
        mixed = 2 * keys + heads * wide  # queries, keys and values
        value, repeated = heads * wide, 2 * heads * head
        # The projection, its convolution's result, both with norms; the gate and the values apart; decays and rates.
        projected = (3 * mixed + repeated + 3 * value + 2 * heads) * s.itemsize + 4 * heads * FP32
        states = heads / CHUNK * head * wide * FP32
        if s.kernels == "torch":
            # In fp32, as `numerics.delta_rule` keeps them: inputs and their weighted copies, scores of chunks, states.
            core = heads * (8 * head + 6 * wide + 5 * CHUNK) * FP32 + 2 * states + 4 * mixed * FP32
            work = heads * (4 * head + 4 * wide + 2 * CHUNK) * FP32
        else:
            core = (value + heads * CHUNK) * s.itemsize  # the output, and a chunk's solved system
            work = (repeated + 2 * value) * s.itemsize + 2 * states
        return {
            "attention_input": s.share * model["hidden_size"] * s.itemsize,
            "projected": projected,
            "core": core,
            "context": value * s.itemsize + s.norm(value),
            "core_work": work,
        }

    def state_elements(self, model: Mapping[str, Any]) -> tuple[int, int]:
        key, value = model["linear_key_head_dim"], model["linear_value_head_dim"]
        heads, nets = model["linear_num_value_heads"], sum(model["linear_attention_freq"])
        channels = 2 * model["linear_num_key_heads"] * key + heads * value
        return nets * channels * (model["linear_conv_kernel_dim"] - 1), nets * heads * key * value

    def exchanged(self, model: Mapping[str, Any]) -> int:
        """Counts a delta net's projected inputs, and its outputs."""
        keys, values = model["linear_num_key_heads"], model["linear_num_value_heads"]
        inputs = 2 * keys * model["linear_key_head_dim"] + 2 * values * (model["linear_value_head_dim"] + 1)
        return inputs + values * model["linear_value_head_dim"]

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        if device == "cuda" and "fla" in packages:
            return ("gated delta rule: flash-linear-attention's kernels",)
        missing = "flash-linear-attention is not installed" if device == "cuda" else "there is no CUDA"
        return (f"gated delta rule in plain torch: {missing}",)

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.recurrent.adapters.megatron.delta_net import decoder_spec

        return decoder_spec(transformer, chunk)


def layer_kind(hf: Mapping[str, Any]) -> LayerKind:
    """Returns the kind of a model of Qwen3-Next's shape."""
    return DeltaNets()
