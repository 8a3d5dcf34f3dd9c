"""megatron-core's MoE router with the arithmetic of exact mode."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter

from slimx.adapters.megatron.layers import served
from slimx.extras.exact import operations as exact
from slimx.trainer.moe.router import PolicyRouter


class _ExactRouting(TopKRouter):
    """Routing with fp32 logits; of experts with equal scores, the one with the lower id is selected."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Computes the router's logits, fp32 [t, 1, experts], from `input` [t, 1, hidden]."""
        return exact.linear(input.float(), served(self.weight).float())

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each token's expert probabilities (0 for unselected experts) and routing map (True for selected
        ones), both [t, experts], from `logits` [t, 1, experts]."""
        config = self.config
        flat = logits.view(-1, config.num_moe_experts)
        # As in megatron-core: sigmoid scores are renormalized if several experts are selected, and softmax scores
        # unless softmax precedes the selection.
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
        if self.router_replay is not None:  # only records the selected experts; exact mode never replays them
            self.router_replay.get_replay_topk(flat, self.topk, None, None, lambda *_, **__: (weights, experts))
        probs = torch.zeros_like(flat).scatter(1, experts, weights)
        return probs, torch.zeros_like(flat, dtype=torch.bool).scatter(1, experts, True)


class ExactRouter(PolicyRouter, _ExactRouting):
    """slimx's router (`PolicyRouter`) with the arithmetic of exact mode."""

    gating = _ExactRouting.gating
