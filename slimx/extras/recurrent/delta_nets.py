"""Decoders of gated delta nets (Yang et al., 2412.06464) and attention, as a kind of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK
from slimx.layout.maps import Cut
from slimx.models.fields import Fields
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
"""Fields of a DeltaNet by their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated delta net. Every key head serves `values // keys` value heads that follow each other."""

    hidden: int
    keys: int
    """Key heads; there are as many of queries."""
    values: int
    """Value heads."""
    key_head: int
    value_head: int
    """Dimension of each."""
    width: int
    """Tokens that the convolution sees."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Sizes out of config.json, or of megatron-core's TransformerConfig: both call them the same."""
        return cls(**{name: config[theirs] for name, theirs in SIZES.items()})

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
        """Rows of queries, keys and values, which the convolution sees."""
        return 2 * self.key + self.value

    @property
    def share(self) -> int:
        """Rows of the values that belong to one key head."""
        return self.value // self.keys

    @property
    def rates(self) -> int:
        """Learning rates, and decays, that belong to one key head."""
        return self.values // self.keys

    @property
    def mixed(self) -> tuple[Cut, Cut, Cut]:
        """Queries, keys and values, one kind behind the other in the first source."""
        head = self.key_head
        return Cut(0, 0, head, head), Cut(0, self.key, head, head), Cut(0, 2 * self.key, self.share, self.share)


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
        net = DeltaNet.of(model)
        weights = net.hidden * (net.channels + 2 * net.value + 2 * net.values) + net.width * net.channels
        inside = CHUNK * (2 * net.key_head + net.value_head)
        return weights + net.values * (inside + 3 * net.key_head * net.value_head)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Heads are split over the tensor-parallel ranks, tokens are whole; under context parallelism a rank has fewer
        heads of more tokens, as many numbers as without. Keys and queries are repeated for the value heads that they
        serve, as megatron-core does it. Never measured."""
        if parts.mixer == "attention":
            return None
        s, net = setting, DeltaNet.of(model)
        head, wide = net.key_head, net.value_head
        heads = s.tokens * net.values / s.sizes.tensor  # numbers of one per token and value head
        mixed = s.tokens * net.channels / s.sizes.tensor
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
            "attention_input": s.share * net.hidden * s.itemsize,
            "projected": projected,
            "core": core,
            "context": value * s.itemsize + s.norm(value),
            "core_work": work,
        }

    def state_elements(self, model: Mapping[str, Any]) -> tuple[int, int]:
        net, nets = DeltaNet.of(model), sum(model["linear_attention_freq"])
        return nets * net.channels * (net.width - 1), nets * net.value * net.key_head

    def exchanged(self, model: Mapping[str, Any]) -> int:
        """Counts a delta net's projected inputs, and its outputs."""
        net = DeltaNet.of(model)
        return 2 * net.key + 3 * net.value + 2 * net.values

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        if device == "cuda" and "fla" in packages:
            return ("gated delta rule: flash-linear-attention's kernels",)
        missing = "flash-linear-attention is not installed" if device == "cuda" else "there is no CUDA"
        return (f"gated delta rule in plain torch: {missing}",)

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.recurrent.adapters.megatron.delta_net import decoder_spec

        return decoder_spec(transformer, chunk)


def layer_kind(hf: Fields) -> LayerKind:
    """Returns the kind of a model of Qwen3-Next's shape."""
    return DeltaNets()
