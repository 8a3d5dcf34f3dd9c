"""Properties of decoders with gated delta nets (Yang et al., 2412.06464) in some layers and attention in the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK
from slimx.layout.maps import Cut
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind, LayerParts, mlps

FP32 = 4
SIZES = {
    "hidden": "hidden_size",
    "keys": "linear_num_key_heads",
    "values": "linear_num_value_heads",
    "key_head": "linear_key_head_dim",
    "value_head": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}
"""Field of DeltaNet -> its name in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated delta net. Each query and key head is used for `values // keys` consecutive value heads."""

    hidden: int
    keys: int
    """Number of key heads, equal to the number of query heads."""
    values: int
    """Number of value heads."""
    key_head: int
    """Number of dimensions of each key head, and of each query head."""
    value_head: int
    """Number of dimensions of each value head."""
    width: int
    """Width of the causal convolution, in tokens."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Returns the sizes that `config` contains. `config`: contents of config.json, or fields of megatron-core's
        TransformerConfig; both use the same field names."""
        return cls(**{field: config[key] for field, key in SIZES.items()})

    def __post_init__(self) -> None:
        if self.values % self.keys:
            raise ValueError(f"{self.values} value heads of a delta net are not a multiple of {self.keys} key heads")

    @property
    def key(self) -> int:
        """Number of projection rows for all query heads, equal to the number for all key heads."""
        return self.keys * self.key_head

    @property
    def value(self) -> int:
        """Number of projection rows for all value heads, equal to the number for all output gates."""
        return self.values * self.value_head

    @property
    def channels(self) -> int:
        """Number of projection rows for queries, keys and values together, equal to the number of input channels of the
        convolution."""
        return 2 * self.key + self.value

    @property
    def value_rows(self) -> int:
        """Number of value rows that belong to one key head."""
        return self.value // self.keys

    @property
    def rates(self) -> int:
        """Number of learning rates that belong to one key head, equal to the number of decays."""
        return self.values // self.keys

    @property
    def mixed(self) -> tuple[Cut, Cut, Cut]:
        """Cuts (row ranges, one per key head) for queries, keys and values in source 0, the tensor that stores all
        queries, then all keys, then all values."""
        queries = Cut(0, 0, self.key_head, self.key_head)
        keys = Cut(0, self.key, self.key_head, self.key_head)
        values = Cut(0, 2 * self.key, self.value_rows, self.value_rows)
        return queries, keys, values


@dataclass(frozen=True)
class DeltaNets(LayerKind):
    """Properties of a decoder with delta nets in the layers that have a 1 in `linear_attention_freq`, and with
    attention in the other layers."""

    unproven = {
        "delta nets": ("rollout.engines.role", "rollout.engines.sglang.speculative_algorithm"),
        "megatron-core's experimental attention": ("trainer.offload_activations",),
    }

    def layers(self, model: Mapping[str, Any]) -> tuple[LayerParts, ...]:
        parts = []
        for recurrent, mlp in zip(model["linear_attention_freq"], mlps(model), strict=True):
            parts.append(LayerParts("recurrent" if recurrent else "attention", mlp))
        return tuple(parts)

    def split_rules(self) -> tuple[Any, ...]:
        from slimx.extras.recurrent.rules import shares_key_heads

        return (shares_key_heads,)

    def mixer_products(self, model: Mapping[str, Any]) -> int:
        """Returns the multiply-adds per token of one delta net in the forward pass: products with weights, including
        the convolution's, and products of the gated delta rule (arXiv:2412.06464, section 3.3) in chunks of 64 tokens,
        as in flash-linear-attention.

        For each value head, the rule multiplies key and query by the chunk's keys, the chunk's scores by its new
        values, and three vectors by the state. Solving triangular systems is not counted.
        """
        net = DeltaNet.of(model)
        weights = net.hidden * (net.channels + 2 * net.value + 2 * net.values) + net.width * net.channels
        inside = CHUNK * (2 * net.key_head + net.value_head)
        return weights + net.values * (inside + 3 * net.key_head * net.value_head)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Returns the size in bytes of one delta net's activations, by field of `LayerBytes`; None for a layer with
        attention. The result has never been compared with a measurement.

        Tensor-parallel ranks split heads, but not tokens. Under context parallelism, a rank has fewer heads but more
        tokens, so the number of elements stays the same. Keys and queries are repeated for each value head, as in
        megatron-core."""
        if parts.mixer == "attention":
            return None
        net = DeltaNet.of(model)
        head = net.key_head
        wide = net.value_head
        # Number of elements of a tensor with one element per token and value head.
        heads = setting.tokens * net.values / setting.sizes.tensor
        mixed = setting.tokens * net.channels / setting.sizes.tensor
        value = heads * wide
        repeated = 2 * heads * head
        # The projection; the convolution's result; normalized queries and keys; gates and values; decays and rates.
        projected = (3 * mixed + repeated + 3 * value + 2 * heads) * setting.itemsize + 4 * heads * FP32
        states = heads / CHUNK * head * wide * FP32
        if setting.kernels == "torch":
            # `numerics.delta_rule` saves in fp32: inputs and their weighted copies, scores within chunks, and states.
            core = heads * (8 * head + 6 * wide + 5 * CHUNK) * FP32 + 2 * states + 4 * mixed * FP32
            work = heads * (4 * head + 4 * wide + 2 * CHUNK) * FP32
        else:
            core = (value + heads * CHUNK) * setting.itemsize  # the output, and the solution of each chunk's system
            work = (repeated + 2 * value) * setting.itemsize + 2 * states
        return {
            "attention_input": setting.share * net.hidden * setting.itemsize,
            "projected": projected,
            "core": core,
            "context": value * setting.itemsize + setting.norm(value),
            "core_work": work,
        }

    def state_elements(self, model: Mapping[str, Any]) -> tuple[int, int]:
        net = DeltaNet.of(model)
        nets = sum(model["linear_attention_freq"])
        return nets * net.channels * (net.width - 1), nets * net.value * net.key_head

    def exchanged(self, model: Mapping[str, Any]) -> int:
        """Returns the number of elements per token that context-parallel ranks exchange in one delta net: projected
        inputs, and outputs."""
        net = DeltaNet.of(model)
        return 2 * net.key + 3 * net.value + 2 * net.values

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        if device != "cuda":
            return ()
        if "fla" in packages:
            return ("gated delta rule: flash-linear-attention's kernels",)
        return ("gated delta rule in plain torch: flash-linear-attention is not installed",)

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.recurrent.adapters.megatron.delta_net import decoder_spec

        return decoder_spec(transformer, chunk)


def layer_kind(hf: HfConfig) -> LayerKind:
    """Returns the layer kind that Qwen3-Next and Qwen3.5 share."""
    return DeltaNets()
