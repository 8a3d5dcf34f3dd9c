"""A kind of decoder, as trainer, engines and planner need it: which parts each layer has, what they compute, and how
megatron-core builds them.

`LayerKind` is a decoder whose layers all have attention. A decoder with other layers is a class derived from it, which
a family returns (`layer_kind`), and an entry point of the group `slimx.layer_kinds`. `model`: fields of megatron-core's
TransformerConfig. Methods import megatron-core where they need it: drivers do without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimx.config.rule import Rule
    from slimx.config.sections.trainer import Trainer
    from slimx.layout.ranks import Sizes

GROUP = "slimx.layer_kinds"
Packing = Callable[..., "PackedSeqParams"]
"""Makes the bounds of a micro-batch's sequences from the arguments of PackedSeqParams."""


class LayerParts(NamedTuple):
    """Parts of one decoder layer."""

    mixer: Literal["attention", "recurrent"] | None
    mlp: Literal["dense", "experts"] | None


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """Floating-point operations of forward and backward pass on one sequence of n tokens: linear n + quadratic n^2."""

    linear: float
    """Operations of every token: matrix products with weights."""
    quadratic: float
    """Operations of every pair of tokens: causal attention, where half of the pairs are masked."""

    def __call__(self, tokens: int) -> float:
        """FLOPs of a sequence of `tokens` tokens."""
        return self.linear * tokens + self.quadratic * tokens * tokens


@dataclass(frozen=True)
class LayerKind:
    """Attention in every layer."""

    unproven: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Kind of layers -> configuration keys that were never proven with it, as `slimx.rules.unproven` writes them."""
    fuses_rotation: ClassVar[bool] = True
    """True if megatron-core's fused kernels can rotate queries and keys of the attention."""

    def layers(self, model: Mapping[str, Any]) -> tuple[LayerParts, ...]:
        """Returns the parts of each decoder layer."""
        return tuple(LayerParts("attention", mlp) for mlp in mlps(model))

    def split_rules(self) -> tuple[Rule, ...]:
        """Returns rules about sizes of parallel groups, for the policy and, under other keys, the critic."""
        return ()

    # FLOPs

    def mixer_products(self, model: Mapping[str, Any]) -> int:
        """Returns products of one recurrent mixer for every token, in the forward pass."""
        return 0

    def attention_flops(self, model: Mapping[str, Any], layers: int, pairs: int) -> SequenceFlops:
        """Returns operations of `layers` attention layers apart from products with projections. `pairs`: dimensions of
        one layer's two products of a pair of tokens, all heads together."""
        return causal_attention(model, layers, pairs)

    # Memory

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Returns bytes of activations that the mixer of a layer keeps for a planner's `setting`, by name of its
        `LayerBytes`; None: those of grouped-query or latent attention."""
        return None

    def microbatch_bytes(self, model: Mapping[str, Any], setting: Any, layers: Sequence[int]) -> float:
        """Returns bytes that `layers` of a stage keep for one micro-batch until its backward pass, whatever is computed
        again. `setting`: a planner's."""
        return 0.0

    def stage_starts(self, layers: int) -> Sequence[int]:
        """Returns those of a model's `layers`, counted from 0, that may be the first of a pipeline stage."""
        return range(layers)

    def materialises(self, trainer: Trainer) -> bool | None:
        """Returns True if trainers hold attention scores of all pairs of tokens; None: as attention kernels do."""
        return None

    def state_elements(self, model: Mapping[str, Any]) -> tuple[int, int]:
        """Returns elements of one request's recurrent states in an engine, all ranks together: inputs of convolutions,
        and states proper."""
        return 0, 0

    def cache_bytes(self, model: Mapping[str, Any]) -> int:
        """Returns bytes of a token in one layer of an engine's cache, in addition to keys and values."""
        return 0

    def replay_bytes(self, model: Mapping[str, Any], tokens: int, length: int, layers: Sequence[int]) -> int:
        """Returns host memory for the choices of one micro-batch that `recorder` keeps for later passes. `tokens`: of a
        context-parallel rank; `length`: of all those ranks; `layers`: those of a pipeline rank, counted from 0."""
        return 0

    def exchanged(self, model: Mapping[str, Any]) -> int:
        """Returns elements of a token that ranks of a context-parallel group exchange in one recurrent mixer."""
        return 0

    # Trainer

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        """Returns a sentence about the kernels of each recurrent mixer, for the log."""
        return ()

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        """Returns megatron-core's specification of the decoder. `transformer`: its TransformerConfig; `chunk`: index of
        a virtual pipeline stage, None without."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=chunk)

    def model_class(self, kind: Callable[..., Any], sizes: Sizes) -> Callable[..., Any]:
        """Returns the class of the model's chunks where GPTModel's would be `kind`."""
        return kind

    def fp32_parameters(self, module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        """Yields parameters of `module` that stay fp32 in a model of half precision."""
        yield from ()

    def recorder(self, trainer: Trainer) -> Callable[[], Packing] | None:
        """Returns a maker of one `Packing` for each micro-batch, on which layers record their choices in the first pass
        and repeat them in later ones; None: every pass chooses anew."""
        return None


ATTENTION_ONLY = LayerKind()


def causal_attention(model: Mapping[str, Any], layers: int, pairs: int) -> SequenceFlops:
    """Returns operations of `LayerKind.attention_flops` for causal attention over whole sequences. In a layer with a
    window every token is counted to see all of it, as nearly all of a sequence much longer than the window do."""
    local = sum(model["window_attn_skip_freq"]) if model.get("window_size") else 0
    seen = local * (model["window_size"][0] + 1) if local else 0
    return SequenceFlops(linear=3 * 2 * pairs * seen, quadratic=3 * 2 * (layers - local) * pairs / 2)


def mlps(model: Mapping[str, Any]) -> tuple[Literal["dense", "experts"], ...]:
    """Returns the kind of each layer's MLP: with experts in all layers unless `moe_layer_freq` lists them."""
    layers = model["num_layers"]
    if not model.get("num_moe_experts"):
        return ("dense",) * layers
    frequency = model.get("moe_layer_freq") or 1
    has = [layer % frequency == 0 for layer in range(layers)] if isinstance(frequency, int) else map(bool, frequency)
    return tuple("experts" if experts else "dense" for experts in has)
