"""Hybrid decoders, as a kind of layers: Mamba-2 (Dao and Gu, 2405.21060), attention, MLPs and experts, each of which is
a layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK, STATE_CHUNK
from slimx.extras.recurrent.state_space import Kind, StateSpace
from slimx.layout.ranks import Sizes
from slimx.models.layer_kind import LayerKind, LayerParts

FP32 = 4
_PARTS: Mapping[Kind, LayerParts] = {
    "M": LayerParts("recurrent", None),
    "*": LayerParts("attention", None),
    "-": LayerParts(None, "dense"),
    "E": LayerParts(None, "experts"),
}


@dataclass(frozen=True)
class HybridLayers(LayerKind):
    """Layers of megatron-core's HybridModel."""

    pattern: str
    """A character for each layer: Mamba-2, attention, MLP, experts (M * - E)."""

    unproven = {"Mamba-2": ("trainer.qat", "trainer.optimizer.kind", "trainer.freeze", "trainer.offload_activations")}

    def layers(self, model: Mapping[str, Any]) -> tuple[LayerParts, ...]:
        return tuple(_PARTS[kind] for kind in self.pattern)

    def split_rules(self) -> tuple[Any, ...]:
        from slimx.extras.recurrent.rules import shares_groups

        return (shares_groups,)

    def mixer_products(self, model: Mapping[str, Any]) -> int:
        """Counts products of a Mamba-2 layer with its weights, those of its convolution among them, and of the
        state-space rule."""
        sizes = StateSpace.of(model)
        weights = sizes.hidden * (sizes.projected + sizes.inner) + sizes.width * sizes.mixed
        return weights + sizes.rule(STATE_CHUNK)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float] | None:
        """Groups of heads are split over the tensor-parallel ranks, tokens are whole. Never measured."""
        if parts.mixer == "attention":
            return None
        s, sizes = setting, StateSpace.of(model)
        tokens = s.tokens / s.sizes.tensor  # as if every rank had all channels of fewer tokens
        inner, mixed, heads = tokens * sizes.inner, tokens * sizes.mixed, tokens * sizes.heads
        if s.kernels == "torch":
            # The projection; of the convolution fp32 inputs of each tap, its result and silu's; in fp32, as
            # `numerics.state_space` keeps them: inputs, keys and queries, scores and weights of chunks, states.
            projected = (tokens * sizes.projected + 2 * mixed) * s.itemsize + (sizes.width + 1) * mixed * FP32
            states = heads / CHUNK * sizes.head * sizes.state * FP32
            scores = (2 * heads + tokens * sizes.groups) * CHUNK * FP32
            core = (6 * inner + 2 * heads * sizes.state + 4 * tokens * sizes.keys + 4 * heads) * FP32
            core += scores + 2 * states
            work = scores + (2 * inner + 2 * heads * sizes.state) * FP32
        else:
            # mamba_ssm's fused function keeps its input and the scan's output, and computes the rest again.
            projected, core = tokens * sizes.projected * s.itemsize, inner * s.itemsize
            states = heads / STATE_CHUNK * sizes.head * sizes.state * FP32
            work = (2 * tokens * sizes.projected + 2 * inner) * s.itemsize + 2 * states
        return {
            "attention_input": s.share * model["hidden_size"] * s.itemsize,
            # All kept: recomputation of an attention's core leaves a mixer alone.
            "projected": projected + core,
            "context": inner * s.itemsize + s.norm(inner),
            "core_work": work,
        }

    def state_elements(self, model: Mapping[str, Any]) -> tuple[int, int]:
        sizes, layers = StateSpace.of(model), self.pattern.count("M")
        return layers * sizes.mixed * (sizes.width - 1), layers * sizes.inner * sizes.state

    def kernels(self, device: str, packages: Collection[str]) -> tuple[str, ...]:
        if "M" not in self.pattern:
            return ()
        lacking = [name for name in ("mamba_ssm", "causal_conv1d") if name not in packages]
        if device == "cuda" and not lacking:
            return ("state-space rule of Mamba-2: mamba_ssm's kernels",)
        missing = f"{' and '.join(lacking)} not installed" if device == "cuda" else "there is no CUDA"
        return (f"state-space rule of Mamba-2 in plain torch: {missing}",)

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.recurrent.adapters.megatron.mamba import stack_spec

        return stack_spec(transformer)

    def model_class(self, kind: Callable[..., Any], sizes: Sizes) -> Callable[..., Any]:
        from slimx.extras.recurrent.hybrid_model import HybridPolicyModel, segments

        return partial(HybridPolicyModel, hybrid_layer_pattern=segments(self.pattern, sizes.split, sizes.stages))

    def fp32_parameters(self, module: Any) -> Iterator[Any]:
        """Yields the parameters that megatron-core makes in fp32."""
        from megatron.core.ssm.mamba_mixer import MambaMixer

        if isinstance(module, MambaMixer):
            yield from (module.A_log, module.D)
