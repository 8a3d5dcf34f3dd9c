"""Kinds of decoders as trainer, engines and planner need them: which parts each layer has, what they compute, and how
megatron-core builds them.

`LayerKind` is a decoder with attention in every layer. A decoder with other layers is a subclass, which a family
returns (`layer_kind`), and an entry point of the group `slimx.layer_kinds`. `model`: fields of megatron-core's
TransformerConfig. Methods import megatron-core where they need it, because drivers run without torch."""

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
"""Creates the sequence boundaries of a micro-batch from the arguments of PackedSeqParams."""


class LayerParts(NamedTuple):
    """Parts of one decoder layer."""

    mixer: Literal["attention", "recurrent"] | None
    mlp: Literal["dense", "experts"] | None


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """FLOPs of forward and backward pass on one sequence of n tokens: linear n + quadratic n^2."""

    linear: float
    """FLOPs per token: matrix products with weights."""
    quadratic: float
    """FLOPs per pair of tokens: causal attention, which masks half of the pairs."""

    def __call__(self, tokens: int) -> float:
        """Returns the FLOPs of a sequence of `tokens` tokens."""
        return self.linear * tokens + self.quadratic * tokens * tokens


class MicrobatchSetting(Protocol):
    """Properties of a micro-batch and its trainer that activation memory depends on, as the planner gives them."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on one context-parallel rank."""
        ...

    @property
    def sizes(self) -> Sizes:
        """Parallel sizes of the trainer."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations."""
        ...

    @property
    def materialized(self) -> bool:
        """True if the attention keeps its probabilities."""
        ...


@dataclass(frozen=True)
class LayerKind:
    """A decoder with attention in every layer."""

    unproven: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Kind of layers -> configuration keys that were never tested with it, in the form of `slimx.rules.unproven`."""
    fuses_rotation: ClassVar[bool] = True
    """True if megatron-core's fused kernels can apply rotary embeddings to queries and keys."""

    def layers(self, model: ModelFields) -> tuple[LayerParts, ...]:
        """Returns the parts of each decoder layer."""
        return tuple(LayerParts("attention", mlp) for mlp in mlps(model))

    def split_rules(self) -> tuple[Rule, ...]:
        """Returns rules on parallel sizes, for the policy and, under other keys, for the critic."""
        return ()

    # FLOPs

    def mixer_products(self, model: ModelFields) -> int:
        """Returns the products of one recurrent mixer per token, in the forward pass."""
        return 0

    def attention_flops(self, model: ModelFields, layers: int, pairs: int) -> SequenceFlops:
        """Returns the FLOPs of `layers` attention layers, without the projections. `pairs`: dimensions of one layer's
        two products of a pair of tokens, summed over heads."""
        return causal_attention(model, layers, pairs)

    # Memory

    def mixer_bytes(self, model: ModelFields, setting: MicrobatchSetting, parts: LayerParts) -> dict[str, float] | None:
        """Returns the activation bytes that a layer's mixer keeps, by field name of the planner's `LayerBytes`. None:
        those of grouped-query or latent attention."""
        return None

    def microbatch_bytes(self, model: ModelFields, setting: MicrobatchSetting, layers: Sequence[int]) -> float:
        """Returns the bytes that `layers` of a stage keep for one micro-batch until its backward pass, regardless of
        recomputation."""
        return 0.0

    def stage_starts(self, layers: int) -> Sequence[int]:
        """Returns the indices, from 0, of the model's `layers` that may be the first of a pipeline stage."""
        return range(layers)

    def materializes(self, trainer: Trainer) -> bool | None:
        """Returns True if trainers hold attention scores of all token pairs; None: the attention kernel decides."""
        return None

    def state_elements(self, model: ModelFields) -> tuple[int, int]:
        """Returns the elements of one request's recurrent state in an engine, over all ranks: convolution inputs and
        recurrent states."""
        return 0, 0

    def cache_bytes(self, model: ModelFields) -> int:
        """Returns the bytes per token and layer of an engine's cache in addition to keys and values."""
        return 0

    def replay_bytes(self, model: ModelFields, tokens: int, length: int, layers: Sequence[int]) -> int:
        """Returns the host memory for one micro-batch of choices that `recorder` keeps for later passes. `tokens`: of a
        context-parallel rank; `length`: of all those ranks; `layers`: those of a pipeline rank, counted from 0."""
        return 0

    def exchanged(self, model: ModelFields) -> int:
        """Returns the elements per token that ranks of a context-parallel group exchange in one recurrent mixer."""
        return 0

    # Trainer

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        """Returns a sentence per recurrent mixer about its kernels, for the log."""
        return ()

    def decoder_spec(self, transformer: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
        """Returns megatron-core's layer specification of the decoder. `chunk`: index of the virtual pipeline stage;
        None without virtual stages."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=chunk)

    def model_class(self, kind: Callable[..., torch.nn.Module], sizes: Sizes) -> Callable[..., torch.nn.Module]:
        """Returns the class of the model's chunks in place of `kind`, GPTModel's."""
        return kind

    def fp32_parameters(self, module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        """Yields the parameters of `module` that stay fp32 in a half-precision model."""
        yield from ()

    def recorder(self, trainer: Trainer) -> Callable[[], Packing] | None:
        """Returns a factory of one `Packing` per micro-batch on which layers record their choices in the first pass and
        replay them in later ones. None: every pass chooses anew."""
        return None


ATTENTION_ONLY = LayerKind()


def causal_attention(model: ModelFields, layers: int, pairs: int) -> SequenceFlops:
    """Returns the FLOPs of `LayerKind.attention_flops` for causal attention over whole sequences. In layers with a
    sliding window every token is counted as seeing all of it, which holds for nearly all tokens of a long sequence."""
    local = sum(model["window_attn_skip_freq"]) if model.get("window_size") else 0
    seen = local * (model["window_size"][0] + 1) if local else 0
    return SequenceFlops(linear=3 * 2 * pairs * seen, quadratic=3 * 2 * (layers - local) * pairs / 2)


def mlps(model: ModelFields) -> tuple[Literal["dense", "experts"], ...]:
    """Returns the kind of each layer's MLP. All layers have experts unless `moe_layer_freq` lists them."""
    layers = model["num_layers"]
    if not model.get("num_moe_experts"):
        return ("dense",) * layers
    frequency = model.get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    return tuple("experts" if has_experts else "dense" for has_experts in frequency)
