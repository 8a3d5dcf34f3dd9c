"""Properties of hybrid decoders, in which each layer is Mamba-2 (Dao and Gu, 2405.21060), attention, an MLP or
experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK, STATE_CHUNK
from slimx.extras.recurrent.state_space import StateSpace
from slimx.layout.ranks import Sizes
from slimx.models.layer_kind import LayerKind, LayerParts

FP32 = 4
_PARTS: Mapping[str, LayerParts] = {
    "M": LayerParts("recurrent", None),
    "*": LayerParts("attention", None),
    "-": LayerParts(None, "dense"),
    "E": LayerParts(None, "experts"),
}


@dataclass(frozen=True)
class HybridLayers(LayerKind):
    """Properties of a hybrid decoder, which has layers of several kinds and is built by megatron-core's HybridModel."""

    pattern: str
    """One character per layer: M for Mamba-2, * for attention, - for an MLP, E for experts."""

    unproven = {"Mamba-2": ("trainer.qat", "trainer.optimizer.kind", "trainer.freeze", "trainer.offload_activations")}

    def layers(self, model: Mapping[str, Any]) -> tuple[LayerParts, ...]:
        return tuple(_PARTS[kind] for kind in self.pattern)

    def split_rules(self) -> tuple[Any, ...]:
        from slimx.extras.recurrent.rules import shares_groups

        return (shares_groups,)

    def mixer_products(self, model: Mapping[str, Any]) -> int:
        """Returns the multiply-adds per token of one Mamba-2 layer in the forward pass: products with weights,
        including the convolution's, and products of the state-space rule."""
        sizes = StateSpace.of(model)
        weights = sizes.hidden * (sizes.projected + sizes.inner) + sizes.width * sizes.mixed
        return weights + sizes.rule(STATE_CHUNK)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Returns the size in bytes of one Mamba-2 layer's activations, by field of `LayerBytes`; None for a layer with
        attention. The result has never been compared with a measurement.

        Tensor-parallel ranks split groups of heads, but not tokens."""
        if parts.mixer == "attention":
            return None
        sizes = StateSpace.of(model)
        # Counts elements as if every rank had all channels of fewer tokens.
        tokens = setting.tokens / setting.sizes.tensor
        inner = tokens * sizes.inner
        mixed = tokens * sizes.mixed
        heads = tokens * sizes.heads
        itemsize = setting.itemsize
        if setting.kernels == "torch":
            # The projection; the convolution's fp32 inputs per tap, its result and silu's result.
            # `numerics.state_space` saves in fp32: inputs, keys and queries, scores and weights within chunks, and
            # states.
            projected = (tokens * sizes.projected + 2 * mixed) * itemsize + (sizes.width + 1) * mixed * FP32
            states = heads / CHUNK * sizes.head * sizes.state * FP32
            scores = (2 * heads + tokens * sizes.groups) * CHUNK * FP32
            core = (6 * inner + 2 * heads * sizes.state + 4 * tokens * sizes.keys + 4 * heads) * FP32
            core += scores + 2 * states
            work = scores + (2 * inner + 2 * heads * sizes.state) * FP32
        else:
            # mamba_ssm's fused function saves its input and the scan's output, and recomputes everything else.
            projected = tokens * sizes.projected * itemsize
            core = inner * itemsize
            states = heads / STATE_CHUNK * sizes.head * sizes.state * FP32
            work = (2 * tokens * sizes.projected + 2 * inner) * itemsize + 2 * states
        return {
            "attention_input": setting.share * model["hidden_size"] * itemsize,
            # Always saved, because recomputation of core attention does not apply to a mixer.
            "projected": projected + core,
            "context": inner * itemsize + setting.norm(inner),
            "core_work": work,
        }

    def state_elements(self, model: Mapping[str, Any]) -> tuple[int, int]:
        sizes = StateSpace.of(model)
        layers = self.pattern.count("M")
        return layers * sizes.mixed * (sizes.width - 1), layers * sizes.inner * sizes.state

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        if "M" not in self.pattern or device != "cuda":
            return ()
        absent = [name for name in ("mamba_ssm", "causal_conv1d") if name not in packages]
        if not absent:
            return ("state-space rule of Mamba-2: mamba_ssm's kernels",)
        return (f"state-space rule of Mamba-2 in plain torch: {' and '.join(absent)} not installed",)

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.recurrent.adapters.megatron.mamba import stack_spec

        return stack_spec(transformer)

    def model_class(self, kind: Callable[..., Any], sizes: Sizes) -> Callable[..., Any]:
        from slimx.extras.recurrent.hybrid_model import HybridPolicyModel, segments

        return partial(HybridPolicyModel, hybrid_layer_pattern=segments(self.pattern, sizes.split, sizes.stages))

    def fp32_parameters(self, module: Any) -> Iterator[Any]:
        """Yields the parameters of a Mamba-2 mixer that megatron-core creates in fp32: A_log and D."""
        from megatron.core.ssm.mamba_mixer import MambaMixer

        if isinstance(module, MambaMixer):
            yield from (module.A_log, module.D)
