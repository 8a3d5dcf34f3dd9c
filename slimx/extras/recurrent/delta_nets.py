"""Decoders with gated delta nets (Yang et al., 2412.06464) and attention, as a kind of layers."""

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
"""Names in config.json of DeltaNet's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated delta net. Each key head serves `values // keys` consecutive value heads."""

    hidden: int
    keys: int
    """Number of key heads, and of query heads."""
    values: int
    """Number of value heads."""
    key_head: int
    """Dimension of a key head."""
    value_head: int
    """Dimension of a value head."""
    width: int
    """Width of the convolution, in tokens."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Returns the sizes from config.json or megatron-core's TransformerConfig, which use the same names."""
        return cls(**{field: config[key] for field, key in SIZES.items()})

    def __post_init__(self) -> None:
        if self.values % self.keys:
            raise ValueError(f"{self.keys} key heads of a delta net cannot serve {self.values} value heads")

    @property
    def key(self) -> int:
        """Rows of all queries, and of all keys."""
        return self.keys * self.key_head

    @property
    def value(self) -> int:
        """Rows of all values, and of all output gates."""
        return self.values * self.value_head

    @property
    def channels(self) -> int:
        """Rows of queries, keys and values: the input of the convolution."""
        return 2 * self.key + self.value

    @property
    def value_rows(self) -> int:
        """Rows of the values of one key head."""
        return self.value // self.keys

    @property
    def rates(self) -> int:
        """Number of learning rates, and of decays, of one key head."""
        return self.values // self.keys

    @property
    def mixed(self) -> tuple[Cut, Cut, Cut]:
        """Queries, keys and values, one kind after the other in the first source."""
        queries = Cut(0, 0, self.key_head, self.key_head)
        keys = Cut(0, self.key, self.key_head, self.key_head)
        values = Cut(0, 2 * self.key, self.value_rows, self.value_rows)
        return queries, keys, values


@dataclass(frozen=True)
class DeltaNets(LayerKind):
    """Delta nets in the layers with a 1 in `linear_attention_freq`, attention in the others."""

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
        """Counts products with weights, including the convolution's, and of the chunk rule (2412.06464, section 3.3) in
        chunks of 64 tokens, as in flash-linear-attention.

        Per value head the rule multiplies key and query with the chunk's keys, the chunk's scores with its new values,
        and three vectors with the state. Its triangular systems are not counted.
        """
        net = DeltaNet.of(model)
        weights = net.hidden * (net.channels + 2 * net.value + 2 * net.values) + net.width * net.channels
        inside = CHUNK * (2 * net.key_head + net.value_head)
        return weights + net.values * (inside + 3 * net.key_head * net.value_head)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Returns the bytes of a delta net's activations. Never measured.

        Heads are split over the tensor-parallel ranks, tokens are not. Under context parallelism a rank has fewer heads
        of more tokens, with the same number of elements. Keys and queries are repeated for the value heads that they
        serve, as in megatron-core."""
        if parts.mixer == "attention":
            return None
        net = DeltaNet.of(model)
        head = net.key_head
        wide = net.value_head
        heads = setting.tokens * net.values / setting.sizes.tensor  # elements with one per token and value head
        mixed = setting.tokens * net.channels / setting.sizes.tensor
        value = heads * wide
        repeated = 2 * heads * head
        # The projection, the convolution's result, both normed; gate and values separately; decays and rates.
        projected = (3 * mixed + repeated + 3 * value + 2 * heads) * setting.itemsize + 4 * heads * FP32
        states = heads / CHUNK * head * wide * FP32
        if setting.kernels == "torch":
            # Saved in fp32 by `numerics.delta_rule`: inputs and their weighted copies, scores of chunks, states.
            core = heads * (8 * head + 6 * wide + 5 * CHUNK) * FP32 + 2 * states + 4 * mixed * FP32
            work = heads * (4 * head + 4 * wide + 2 * CHUNK) * FP32
        else:
            core = (value + heads * CHUNK) * setting.itemsize  # the output, and a chunk's solved system
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
        """Counts a delta net's projected inputs and its outputs."""
        net = DeltaNet.of(model)
        return 2 * net.key + 3 * net.value + 2 * net.values

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        if device == "cuda" and "fla" in packages:
            return ("gated delta rule: flash-linear-attention's kernels",)
        missing = "flash-linear-attention is not installed" if device == "cuda" else "no CUDA device"
        return (f"gated delta rule in plain torch: {missing}",)

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.recurrent.adapters.megatron.delta_net import decoder_spec

        return decoder_spec(transformer, chunk)


def layer_kind(hf: HfConfig) -> LayerKind:
    """Returns the layer kind of models with Qwen3-Next's architecture."""
    return DeltaNets()
