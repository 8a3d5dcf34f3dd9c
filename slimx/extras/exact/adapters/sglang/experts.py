"""MoE layers of an SGLang server in exact mode: selection of experts, their linear layers, and the sum of their
outputs.

Written for sglang 0.5.23; `numerics.py` registers these operations in place of SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slimx.extras.exact import operations as exact
from slimx.extras.exact.adapters.sglang import ranks as sglang_ranks
from slimx.extras.exact.adapters.sglang.blocks import expert_weights

TOP_K = "sglang.srt.layers.moe.topk.fused_topk_native"
GROUPED_TOP_K = "sglang.srt.layers.moe.topk.biased_grouped_topk"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
BLOCKS = {
    "DeepseekV2MoE": "sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward_normal",
    "Glm4MoeSparseMoeBlock": "sglang.srt.models.glm4_moe.Glm4MoeSparseMoeBlock.forward_normal",
}
"""Class name of each MoE layer with a sigmoid router and shared experts -> dotted name of its forward method."""


class ExpertOperations:
    """Operations of a server's MoE layers. `leaves`: number of equal parts (leaves) into which each row-parallel sum is
    cut."""

    def __init__(self, leaves: int):
        self.leaves = leaves
        self._shared: torch.Tensor | None = None
        """Output of the current layer's shared experts, until `experts` adds it to the sum of the routed experts'
        outputs."""

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Returns the replacement functions for SGLang's HookRegistry, by dotted name of the function that each
        replaces."""
        blocks = dict.fromkeys(BLOCKS.values(), self.block)
        return {TOP_K: self.top_k, GROUPED_TOP_K: self.grouped_top_k, EXPERTS: self.experts, **blocks}

    def used(self, kinds: set[str]) -> set[str]:
        """Returns the dotted names of those functions replaced by exact mode that a model calls. `kinds`: class names
        of the model's modules."""
        blocks = {target for kind, target in BLOCKS.items() if kind in kinds}
        if not blocks and "FusedMoE" not in kinds:
            return set()
        return {EXPERTS, GROUPED_TOP_K if blocks else TOP_K} | blocks

    def block(self, layer: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Computes an MoE layer of a class in BLOCKS for `hidden` [tokens, hidden]. The shared experts' output is added
        before the sum of the experts is rounded."""
        from sglang.srt.layers.moe.utils import post_experts_all_reduce

        logits = exact.linear(hidden, layer.gate.weight, dtype=torch.float32)
        choice = layer.topk(hidden, logits)
        if getattr(layer, "shared_experts", None) is not None:
            self._shared = layer.shared_experts(hidden)
        else:
            self._shared = None
        out = layer.experts(hidden, choice)
        return post_experts_all_reduce(out) if getattr(layer, "reduce_results", False) else out

    def grouped_top_k(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        correction_bias: torch.Tensor,
        topk: int,
        renormalize: bool,
        num_expert_group: int,
        topk_group: int,
        routed_scaling_factor: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selects experts by sigmoid scores within groups, and returns weights and ids like `top_k`. The weights
        include `routed_scaling_factor`."""
        weights, ids = exact.route(
            gating_output,
            topk,
            score="sigmoid",
            bias=correction_bias,
            groups=num_expert_group,
            top_groups=topk_group,
            renormalize=renormalize,
            factor=routed_scaling_factor or 1.0,
        )
        return weights, ids.to(torch.int32)

    def top_k(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        topk: int,
        renormalize: bool,
        correction_bias: torch.Tensor | None = None,
        scoring_func: str = "softmax",
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selects each token's experts by softmax scores; returns their weights [tokens, k] fp32 and ids [tokens, k]
        int32, in ascending order of id."""
        weights, ids = exact.route(gating_output, topk, renormalize=renormalize)
        return weights, ids.to(torch.int32)

    def experts(self, layer: Any, x: torch.Tensor, choice: Any, config: Any) -> torch.Tensor:
        """Computes the routed experts of `layer` for x [tokens, hidden] and returns their weighted sum [tokens,
        hidden], which is zero on all TP ranks but the first. This rank stores w13 [experts, 2 n, hidden] and w2
        [experts, hidden, n]. `choice`: each token's selected experts in ascending order, with id -1 for experts on
        other ranks."""
        weights = choice.topk_weights
        ids = choice.topk_ids.long()
        tokens, choices = ids.shape
        flat = ids.flatten()
        local = (flat >= 0).nonzero()[:, 0]
        order = local[flat[local].argsort(stable=True)]
        counts = torch.bincount(flat[order], minlength=len(layer.w13_weight)).tolist()
        w13 = expert_weights(layer, "w13_weight", counts, x.dtype)
        w2 = expert_weights(layer, "w2_weight", counts, x.dtype)
        inner = exact.silu_and_mul(exact.grouped_linear(x[order // choices], w13, counts))
        parts = layer.moe_tp_size
        ranks = layer.moe_tp_size * layer.moe_ep_size
        dtype = x.dtype if ranks == 1 else torch.float32
        out = exact.grouped_linear(inner, w2, counts, self.leaves // parts, dtype=dtype)
        by_choice = out.new_zeros(tokens * choices, out.shape[1])
        by_choice[order] = out
        if ranks > 1:
            by_choice = _sum_over_ranks(by_choice, parts).to(x.dtype)
        shared = self._shared
        self._shared = None
        mixed = exact.moe_combine(by_choice.view(tokens, choices, -1), weights, shared)
        return mixed if ranks == 1 else sglang_ranks.first_rank_only(mixed)


def _sum_over_ranks(partial: torch.Tensor, parts: int) -> torch.Tensor:
    """Returns the complete fp32 outputs of all selected experts from this rank's `partial` outputs. Each expert is
    split into `parts` partial sums on consecutive ranks (SGLang's initialize_model_parallel). Ranks that did not
    compute an expert contribute zeros to its output, so adding them changes no value."""
    from sglang.srt.runtime_context import get_parallel

    by_rank = sglang_ranks.gathered(partial, get_parallel().tp_group)
    by_expert_rank = [exact.combine_leaves(by_rank[first : first + parts]) for first in range(0, len(by_rank), parts)]
    return torch.stack(by_expert_rank).sum(0)
