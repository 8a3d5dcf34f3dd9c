"""megatron-core's router under a watch that identifies the micro-batch: its choice can be recorded and replayed, and
its auxiliary terms use the denominators of the complete update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slimx.adapters.megatron.layers import served
from slimx.algorithms.router_terms import LayerTally
from slimx.errors import SlimxError


@dataclass(slots=True)
class RoutedTokens:
    """One micro-batch as this rank's routers see it: its t tokens that remain after context and sequence
    parallelism."""

    counted: torch.Tensor
    """bool [t]: not padding."""
    segments: torch.Tensor
    """int64 [t]: index of the packed sequence of each token."""
    sequences: int
    """Packed sequences of the micro-batch, on all ranks together."""
    replayed: torch.Tensor | None
    """[routers, t, k]: experts to use; None: the router chooses."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Experts that each router used, [t, k], by the router's index."""


class Cursor:
    """The current micro-batch of a chunk of the model; None outside of a forward pass."""

    def __init__(self) -> None:
        self.tokens: RoutedTokens | None = None


class RouterWatch:
    """One router over one pass of all micro-batches, any number of which may be in flight.

    A call inside a chunk's forward pass belongs to the micro-batch of its cursor. A call outside is recomputation in a
    backward pass. Every schedule of megatron-core runs a chunk's backward passes in the order of its forward passes, so
    the micro-batch is the oldest one not yet recomputed.
    """

    def __init__(self, name: str, cursor: Cursor, row: int | None, tally: LayerTally | None):
        """Takes `row`: index of the router among those that replay; None for one that does not. `tally`: in
        training."""
        self.name = name
        self.row = row
        self.tally = tally
        self._cursor = cursor
        self._again: deque[RoutedTokens] = deque()

    def arrive(self) -> RouterChoice:
        """Returns the choice for the micro-batch that the router is about to process."""
        tokens = self._cursor.tokens
        if tokens is None:
            if not self._again:
                raise SlimxError(
                    f"{self.name} ran outside of a micro-batch; this is a defect of slimx's schedule",
                    code="routing.outside",
                    about=self.name,
                )
            return RouterChoice(self._again.popleft(), self.row, first=False)
        if self.tally is not None and not torch.is_grad_enabled():
            self._again.append(tokens)  # a checkpointed forward pass: autograd will recompute it
        return RouterChoice(tokens, self.row, first=True)

    def finish(self, *, trainable: bool) -> None:
        """Raises SlimxError if the layer of a `trainable` router was not recomputed as required: a checkpointed layer
        gets no gradient if nothing before it requires one."""
        if self._again and trainable:
            raise SlimxError(
                f"{self.name} is trained, but {len(self._again)} micro-batches were not recomputed in the backward "
                "pass and gave its layer no gradient, because everything before it is frozen; set "
                "trainer.recompute.granularity=none",
                code="routing.not_recomputed",
                about=self.name,
            )


@dataclass(slots=True)
class RouterChoice:
    """Chooses experts for a router: by replay, or by the router's own rule."""

    tokens: RoutedTokens
    row: int | None
    first: bool
    """True unless this is a recomputation."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values and experts [t, k] of scores [t, experts], called as upstream's RouterReplay."""
        tokens = self.tokens
        row = self.row
        if row is not None and tokens.replayed is not None:
            experts = tokens.replayed[row].long()
            values = scores.gather(1, experts)
        else:
            values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.first and row is not None:
            small = torch.uint8 if scores.shape[1] <= 256 else torch.int16
            tokens.chosen[row] = experts.detach().to(small)
        return values, experts


class PolicyRouter(TopKRouter):
    """TopKRouter under a RouterWatch, written for megatron-core 0.19.2.

    Upstream's auxiliary losses and bias update stay off: they count padding, weight micro-batches equally, treat a pack
    as one sequence, and with calculate_per_token_loss divide by TP x CP. Upstream's RouterReplay keeps one target per
    router in a global list and must be notified when a backward pass begins, which is impossible while several
    micro-batches are in flight: a RouterChoice replaces it.
    """

    router_replay: RouterChoice | None

    watch: RouterWatch | None = None
    """Watch of the current pass; without one, the router behaves like upstream's."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Computes logits of input with the weight as engines receive it (`served`)."""
        weight = served(self.weight)
        if weight is self.weight:
            return super().gating(input)
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return router_gating_linear(input, weight, self.bias, dtype)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns probabilities and map, both [t, experts], of logits [t, 1, experts]."""
        if self.watch is None:
            return super().routing(logits)
        choice = self.watch.arrive()
        self.router_replay = choice
        try:
            probs, routing_map = super().routing(logits)
        finally:
            self.router_replay = None
        if self.watch.tally is not None and torch.is_grad_enabled():
            flat = logits.view(-1, logits.shape[-1])
            loss = self.watch.tally.terms(flat, routing_map, choice.tokens)
            if loss is not None:
                probs = MoEAuxLossAutoScaler.apply(probs, loss)
        return probs, routing_map

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Does nothing: the tally counts."""


def install(decoder: TransformerBlockSubmodules, kind: type[PolicyRouter] = PolicyRouter) -> None:
    """Has a decoder's spec build the routers of its MoE layers as `kind`."""
    for layer in decoder.layer_specs:
        parts = get_submodules(layer.submodules.mlp) if isinstance(layer, ModuleSpec) else None
        if isinstance(parts, MoESubmodules):
            parts.router = kind
