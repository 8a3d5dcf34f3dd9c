"""megatron-core's router, extended: its choice of experts can be recorded and replayed for each micro-batch, and its
auxiliary losses are means over all tokens or sequences of an update."""

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
    """Tokens of one micro-batch that this rank's routers process: the t tokens that context and sequence parallelism
    assign to this rank."""

    counted: torch.Tensor
    """True for tokens that are not padding, bool [t]."""
    segments: torch.Tensor
    """Index of the packed sequence that each token belongs to, int64 [t]."""
    sequences: int
    """Number of packed sequences in the whole micro-batch."""
    replayed: torch.Tensor | None
    """Experts that the routers must use, [routers, t, k]; None if each router chooses."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Experts that each router used, [t, k], keyed by the router's index among the routers that can replay."""


class Cursor:
    """Micro-batch that a chunk of the model is processing; None outside of a forward pass."""

    def __init__(self) -> None:
        self.tokens: RoutedTokens | None = None


class RouterWatch:
    """Identifies, for one router, the micro-batch of each call during a pass over all micro-batches, several of which
    may be in flight.

    A call during a forward pass of the router's chunk belongs to the micro-batch of the chunk's cursor. Any other call
    is a recomputation during a backward pass. All schedules of megatron-core run a chunk's backward passes in the order
    of its forward passes, so a recomputation belongs to the oldest micro-batch that has not been recomputed yet."""

    def __init__(self, name: str, cursor: Cursor, row: int | None, tally: LayerTally | None):
        """Creates the watch for one pass. `name`: name of the router in messages. `cursor`: shows which micro-batch the
        router's chunk is processing. `row`: index of the router among the routers that can replay; None if this one
        cannot. `tally`: accumulates the tokens per expert and the auxiliary losses in training; None in forward-only
        passes."""
        self.name = name
        self.row = row
        self.tally = tally
        self._cursor = cursor
        self._again: deque[RoutedTokens] = deque()

    def arrive(self) -> RouterChoice:
        """Returns a `RouterChoice` for the current call of the router. It chooses the call's experts and refers to the
        micro-batch to which the call belongs."""
        tokens = self._cursor.tokens
        if tokens is None:
            if not self._again:
                raise SlimxError(
                    f"router {self.name} ran outside a micro-batch, which is a bug in slimx; report the bug with this "
                    "run's configuration",
                    code="routing.outside",
                    about=self.name,
                )
            return RouterChoice(self._again.popleft(), self.row, first=False)
        if self.tally is not None and not torch.is_grad_enabled():
            self._again.append(tokens)  # a checkpointed forward pass, which autograd will recompute
        return RouterChoice(tokens, self.row, first=True)

    def finish(self, *, trainable: bool) -> None:
        """Checks at the end of a pass that every checkpointed call was recomputed. If a call was not recomputed and the
        router is `trainable`, raises SlimxError, because a checkpointed layer gets no gradient if nothing before it
        requires one."""
        if self._again and trainable:
            raise SlimxError(
                f"router {self.name} got no gradient, because all parameters before its layer are frozen, so the "
                "backward pass did not recompute the layer; set trainer.recompute.granularity=none",
                code="routing.not_recomputed",
                about=self.name,
            )


@dataclass(slots=True)
class RouterChoice:
    """Chooses the experts for one call of a router: the replayed experts if there are any, otherwise those that the
    router itself selects."""

    tokens: RoutedTokens
    row: int | None
    first: bool
    """True in the original call; False if the call recomputes an earlier one in a backward pass."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the selected entries of `scores` [t, experts] and their experts, both [t, k]. The router calls this
        method instead of the method of megatron-core's RouterReplay with the same name and signature."""
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
    """megatron-core's TopKRouter with a RouterWatch, adapted to megatron-core 0.19.2.

    megatron-core's own auxiliary losses and bias update stay off: they count padding, weight all micro-batches equally,
    treat packed sequences as one, and divide by TP x CP with calculate_per_token_loss. megatron-core's RouterReplay
    stores one target per router in a global list and must be notified when a backward pass starts, which is impossible
    while several micro-batches are in flight. A RouterChoice replaces it."""

    router_replay: RouterChoice | None

    watch: RouterWatch | None = None
    """Watch for the current pass over the micro-batches; None outside of such passes, when the router behaves like
    megatron-core's."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Computes the logits of `input` with the router's weight as engines receive it (`served`), for example rounded
        by quantization."""
        weight = served(self.weight)
        if weight is self.weight:
            return super().gating(input)
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return router_gating_linear(input, weight, self.bias, dtype)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the routing probabilities and the routing map (True for chosen experts), both [t, experts], for
        `logits` [t, 1, experts]."""
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
        """Does nothing: megatron-core counts the tokens of each expert here, but in slimx `LayerTally` counts them."""


def install(decoder: TransformerBlockSubmodules, kind: type[PolicyRouter] = PolicyRouter) -> None:
    """Changes the spec of a decoder so that the routers of its MoE layers are instances of the class `kind`."""
    for layer in decoder.layer_specs:
        parts = get_submodules(layer.submodules.mlp) if isinstance(layer, ModuleSpec) else None
        if isinstance(parts, MoESubmodules):
            parts.router = kind
