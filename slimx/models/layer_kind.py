"""Kinds of decoder layers, for trainer, engines and planner: which parts each layer has, what they cost, and how
megatron-core builds them.

`LayerKind` describes a decoder with attention in every layer. For decoders with other layers there are subclasses; a
family's `layer_kind` returns an instance, and each subclass is an entry point of the group `slimx.layer_kinds`. The
parameter `model` of methods contains fields of megatron-core's TransformerConfig. Methods import megatron-core only
where they need it, because drivers run without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from slimx.config.rule import Rule
    from slimx.config.sections.trainer import Trainer
    from slimx.layout.ranks import Sizes

GROUP = "slimx.layer_kinds"
type ModelFields = Mapping[str, Any]
"""Fields of megatron-core's TransformerConfig by name."""
Packing = Callable[..., "PackedSeqParams"]
"""Callable that creates a micro-batch's PackedSeqParams (sequence boundaries) from the arguments of that class."""


class LayerParts(NamedTuple):
    """Parts of one decoder layer: the `mixer` combines tokens, and the `mlp` transforms each token separately. A part
    that the layer lacks is None."""

    mixer: Literal["attention", "recurrent"] | None
    mlp: Literal["dense", "experts"] | None


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """FLOPs of the forward and backward pass on one sequence of n tokens: linear * n + quadratic * n^2."""

    linear: float
    """FLOPs per token: products with weight matrices, and attention to a bounded number of keys."""
    quadratic: float
    """FLOPs of causal attention per ordered pair of tokens, averaged over all n^2 pairs, half of which the mask
    excludes."""

    def __call__(self, tokens: int) -> float:
        """Returns the FLOPs of the forward and backward pass on a sequence of `tokens` tokens."""
        return self.linear * tokens + self.quadratic * tokens * tokens


class MicrobatchSetting(Protocol):
    """Properties of a micro-batch and its trainer that determine activation memory; the planner provides them."""

    @property
    def tokens(self) -> int:
        """Number of the micro-batch's tokens on one context-parallel rank."""

    @property
    def sizes(self) -> Sizes:
        """Parallel sizes of the trainer."""

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters and activations."""

    @property
    def materialized(self) -> bool:
        """True if attention stores the probabilities of all token pairs for the backward pass."""


@dataclass(frozen=True)
class LayerKind:
    """Properties of a decoder with attention in every layer; base class for decoders with other kinds of layers."""

    unproven: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Name of a kind of layer -> configuration keys that have never been tested with it, as in
    `slimx.rules.unproven.UNPROVEN`."""
    fuses_rotation: ClassVar[bool] = True
    """True if megatron-core's fused kernels can apply the rotary embeddings to queries and keys."""

    def layers(self, model: ModelFields) -> tuple[LayerParts, ...]:
        """Returns the parts of each decoder layer, in order."""
        return tuple(LayerParts("attention", mlp) for mlp in mlps(model))

    def split_rules(self) -> tuple[Rule, ...]:
        """Returns configuration rules that refuse parallel sizes which do not fit these layers, in addition to the
        rules for all models. These rules are checked for the policy and, with the critic's keys, for the critic."""
        return ()

    # FLOPs

    def mixer_products(self, model: ModelFields) -> int:
        """Returns the multiply-adds per token of one recurrent mixer in the forward pass."""
        return 0

    def attention_flops(self, model: ModelFields, layers: int, pairs: int) -> SequenceFlops:
        """Returns the FLOPs of `layers` attention layers, excluding their projections. `pairs`: number of dimensions of
        one layer's two products (scores and outputs) for one pair of tokens, summed over heads."""
        return causal_attention(model, layers, pairs)

    def input_flops(self) -> float:
        """Returns the FLOPs of the forward and backward pass for those embeddings of one rollout that are not looked
        up. Every rank of the first pipeline stage computes them."""
        return 0.0

    # Memory

    def mixer_bytes(self, model: ModelFields, setting: MicrobatchSetting, parts: LayerParts) -> dict[str, float] | None:
        """Returns the activation bytes that a layer's mixer stores for the backward pass, by field name of the
        planner's `LayerBytes`; None if the mixer is grouped-query or latent attention, whose bytes the planner computes
        itself."""
        return None

    def microbatch_bytes(self, model: ModelFields, setting: MicrobatchSetting, layers: Sequence[int]) -> float:
        """Returns the number of additional bytes that the decoder layers with indices `layers` store for one
        micro-batch until its backward pass, even if their activations are recomputed."""
        return 0.0

    def input_work(self, setting: MicrobatchSetting) -> float:
        """Returns the number of bytes of temporary memory in which the first pipeline stage computes the embeddings of
        a micro-batch, in addition to looking up those of tokens."""
        return 0.0

    def stage_starts(self, layers: int) -> Sequence[int]:
        """Returns the indices, from 0, of the layers with which a pipeline stage may start. `layers`: number of layers
        in the model."""
        return range(layers)

    def materializes(self, trainer: Trainer) -> bool | None:
        """Returns True if trainers store the attention scores of all token pairs; None if that depends on the attention
        kernel."""
        return None

    def state_elements(self, model: ModelFields) -> tuple[int, int]:
        """Returns the number of elements that an engine stores per request over all ranks: convolution inputs, and
        recurrent states."""
        return 0, 0

    def cache_bytes(self, model: ModelFields) -> int:
        """Returns the number of bytes per token and layer that an engine caches in addition to keys and values."""
        return 0

    def replay_bytes(self, model: ModelFields, tokens: int, length: int, layers: Sequence[int]) -> int:
        """Returns the size in bytes of the host memory in which `recorder` stores one micro-batch's discrete choices,
        such as the tokens that sparse attention selects, for later passes. `tokens`: tokens on one context-parallel
        rank; `length`: tokens on all of these ranks; `layers`: indices, from 0, of a pipeline rank's layers."""
        return 0

    def exchanged(self, model: ModelFields) -> int:
        """Returns the number of elements per token that the ranks of a context-parallel group exchange in one recurrent
        mixer."""
        return 0

    # Trainer

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        """Returns, for each kind of recurrent mixer, a sentence for the log that names its kernels on a GPU; () on
        CPUs. `device`: "cpu" or "cuda"; `packages`: installed packages."""
        return ()

    def decoder_spec(self, transformer: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
        """Returns megatron-core's layer specs for this rank's part of the decoder. `chunk`: index of the virtual
        pipeline stage; None if there are no virtual stages."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=chunk)

    def model_class(self, kind: Callable[..., torch.nn.Module], sizes: Sizes) -> Callable[..., torch.nn.Module]:
        """Returns the constructor of the model's chunks: `kind`, a subclass of GPTModel, or a replacement if the
        decoder cannot be built as a GPTModel. `sizes`: the trainer's parallel sizes."""
        return kind

    def fp32_parameters(self, module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        """Yields the parameters of `module` that must stay in fp32 when the model's dtype is bf16 or fp16."""
        yield from ()

    def recorder(self, trainer: Trainer) -> Callable[[], Packing] | None:
        """Returns a function that creates one `Packing` per micro-batch. In the PackedSeqParams that a `Packing`
        builds, layers record discrete choices, such as selected tokens, in the first pass and reuse them in later
        passes. None: each pass makes its choices anew."""
        return None


ATTENTION_ONLY = LayerKind()


def causal_attention(model: ModelFields, layers: int, pairs: int) -> SequenceFlops:
    """Returns the FLOPs of `layers` causal attention layers, as in `LayerKind.attention_flops`. In layers with a
    sliding window, each token counts as attending to a full window, which is true for nearly all tokens of a long
    sequence."""
    local = sum(model["window_attn_skip_freq"]) if model.get("window_size") else 0
    seen = local * (model["window_size"][0] + 1) if local else 0
    return SequenceFlops(linear=3 * 2 * pairs * seen, quadratic=3 * 2 * (layers - local) * pairs / 2)


def mlps(model: ModelFields) -> tuple[Literal["dense", "experts"], ...]:
    """Returns the kind of each layer's MLP, in order. In an MoE model, either all layers have experts or only those
    that `moe_layer_freq` selects."""
    layers = model["num_layers"]
    if not model.get("num_moe_experts"):
        return ("dense",) * layers
    frequency = model.get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    return tuple("experts" if has_experts else "dense" for has_experts in frequency)
