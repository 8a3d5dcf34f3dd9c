"""The router of exact mode."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter

from slimx.adapters.megatron.layers import served
from slimx.extras.exact import operations as exact
from slimx.trainer.moe.router import PolicyRouter


class _ExactRouting(TopKRouter):
    """The arithmetic of exact mode: fp32 logits; of equal experts the lower id."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Computes logits, fp32 [t, 1, experts], of input [t, 1, hidden]."""
        return exact.linear(input.float(), served(self.weight).float())

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns probabilities and routing map, both [t, experts], by the rounding rules of exact mode."""
        config = self.config
        flat = logits.view(-1, config.num_moe_experts)
        # megatron-core renormalizes sigmoid scores of several experts, and softmax scores unless softmax comes first.
        renormalize = self.topk > 1 if self.score_function == "sigmoid" else not config.moe_router_pre_softmax
        weights, experts = exact.route(
            flat,
            self.topk,
            score=self.score_function,
            bias=self.expert_bias,
            groups=config.moe_router_num_groups or 1,
            top_groups=config.moe_router_group_topk or 1,
            renormalize=renormalize,
            factor=config.moe_router_topk_scaling_factor or 1.0,
        )
        if self.router_replay is not None:  # records the choice; exact mode never replays one
            self.router_replay.get_replay_topk(flat, self.topk, None, None, lambda *_, **__: (weights, experts))
        probs = torch.zeros_like(flat).scatter(1, experts, weights)
        return probs, torch.zeros_like(flat, dtype=torch.bool).scatter(1, experts, True)


class ExactRouter(PolicyRouter, _ExactRouting):
    """PolicyRouter in exact mode."""

    gating = _ExactRouting.gating
