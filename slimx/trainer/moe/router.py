"""megatron-core's router, told which micro-batch it routes: its choice can be recorded and replayed, and its auxiliary
terms have the denominators of the whole update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules

from slimx.adapters.megatron.layers import served
from slimx.algorithms.router_terms import LayerTally
from slimx.errors import SlimxError


@dataclass(slots=True)
class RoutedTokens:
    """One micro-batch as the routers of this rank see it: the t tokens of it that are here after the cuts of context
    and sequence parallelism."""

    counted: torch.Tensor
    """bool [t]: no padding."""
    segments: torch.Tensor
    """int64 [t]: number of the packed sequence that each token belongs to."""
    sequences: int
    """Packed sequences of the micro-batch, on all ranks together."""
    replayed: torch.Tensor | None
    """[routers, t, k]: experts to take; None: the router chooses."""
    chosen: dict[int, torch.Tensor] | None = field(default_factory=dict)
    """By number of the router the experts it took, [t, k]; None: not recorded."""


class Cursor:
    """The micro-batch that a chunk of the model works on; None outside a forward pass."""

    def __init__(self) -> None:
        self.tokens: RoutedTokens | None = None


class RouterWatch:
    """One router over one pass of all micro-batches, however many of them are in flight.

    What runs inside a chunk's forward pass belongs to the micro-batch of its cursor. What runs outside of one is
    recomputation in a backward pass. Backward passes of a chunk follow each other in the order of its forward passes,
    in every schedule of megatron-core's, so the micro-batch is the oldest that is not yet computed again.
    """

    def __init__(self, name: str, cursor: Cursor, row: int | None, tally: LayerTally | None):
        """`row`: number of the router among those that replay; None for one that does not. `tally`: in training."""
        self.name, self.row, self.tally = name, row, tally
        self._cursor = cursor
        self._again: deque[RoutedTokens] = deque()

    def arrive(self) -> RouterChoice:
        """The choice for the micro-batch that the router is about to see."""
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
            self._again.append(tokens)  # a checkpointed forward pass: autograd will compute it again
        return RouterChoice(tokens, self.row, first=True)

    def finish(self, *, trainable: bool) -> None:
        """Raises SlimxError if a `trainable` router's layer was not computed again that had to be: a checkpointed layer
        gets no gradient if nothing before it wants one."""
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
    """Answers a router that asks for its top-k: by replay, or by the router's own rule."""

    tokens: RoutedTokens
    row: int | None
    first: bool
    """Not a recomputation."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and experts [t, k] of scores [t, experts], as upstream's RouterReplay returns them."""
        tokens, row = self.tokens, self.row
        if row is not None and tokens.replayed is not None:
            experts = tokens.replayed[row].long()
            values = scores.gather(1, experts)
        else:
            values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.first and row is not None and tokens.chosen is not None:
            small = torch.uint8 if scores.shape[1] <= 256 else torch.int16
            tokens.chosen[row] = experts.detach().to(small)
        return values, experts


class PolicyRouter(TopKRouter):
    """TopKRouter under a RouterWatch.

    Upstream's auxiliary losses and bias update stay off: they count padding, weigh micro-batches by their number, take
    a pack for one sequence, and with calculate_per_token_loss divide by TP x CP. Upstream's RouterReplay keeps one
    target per router, in a global list, and wants to be told from outside when a backward pass begins, which nobody can
    while several micro-batches are in flight: a RouterChoice answers in its place. Written for megatron-core 0.19.2.
    """

    watch: RouterWatch | None = None
    """Set for the time of a pass; without one it routes as upstream does."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of input, by what engines get of the weight (`served`)."""
        weight = served(self.weight)
        if weight is self.weight:
            return super().gating(input)
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return router_gating_linear(input, weight, self.bias, dtype)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and map, both [t, experts], of logits [t, 1, experts]."""
        if self.watch is None:
            return super().routing(logits)
        choice = self.router_replay = self.watch.arrive()
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
        """Do nothing: the tally counts."""


def install(decoder: Any, kind: type[PolicyRouter] = PolicyRouter) -> None:
    """Have the layers of a decoder's spec that have experts built with routers of `kind`."""
    for layer in decoder.layer_specs:
        parts = get_submodules(layer.submodules.mlp) if isinstance(layer, ModuleSpec) else None
        if isinstance(parts, MoESubmodules):
            parts.router = kind
