"""Exact mode in an SGLang server: the choice of experts, their products, and the sum of their outputs.

Written for sglang 0.5.23; `sglang_numerics` registers these in the place of SGLang's own functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from slimx.adapters import sglang_ranks
from slimx.numerics import exact

TOP_K = "sglang.srt.layers.moe.topk.fused_topk_native"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"


class ExactExperts:
    """The operations of a server's MoE layers; `calls` counts them by target. `leaves`: of row-parallel sums."""

    def __init__(self, leaves: int, calls: Counter[str]):
        self.leaves = leaves
        self.calls = calls

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """What SGLang's HookRegistry replaces, by target."""
        return {TOP_K: self.top_k, EXPERTS: self.experts}

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
        """Weights [tokens, k] fp32 and ids [tokens, k] int32, in ascending order of id."""
        self.calls[TOP_K] += 1
        weights, ids = exact.route(gating_output, topk, renormalise=renormalize)
        return weights, ids.to(torch.int32)

    def experts(self, layer: Any, x: torch.Tensor, choice: Any, config: Any) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden], with the weights w13 [experts, 2 n, hidden] and w2 [experts, hidden,
        n] of this rank. `choice` has a token's experts in ascending order; -1 is one of another rank's."""
        self.calls[EXPERTS] += 1
        weights, ids = choice.topk_weights, choice.topk_ids.long()
        flat, (tokens, choices) = ids.flatten(), ids.shape
        here = (flat >= 0).nonzero()[:, 0]
        order = here[flat[here].argsort(stable=True)]
        counts = torch.bincount(flat[order], minlength=len(layer.w13_weight)).tolist()
        inner = exact.silu_and_mul(exact.grouped_linear(x[order // choices], list(layer.w13_weight), counts))
        parts, ranks = layer.moe_tp_size, layer.moe_tp_size * layer.moe_ep_size
        dtype = x.dtype if ranks == 1 else torch.float32
        out = exact.grouped_linear(inner, list(layer.w2_weight), counts, self.leaves // parts, dtype=dtype)
        by_choice = out.new_zeros(tokens * choices, out.shape[1])
        by_choice[order] = out
        if ranks > 1:
            by_choice = _whole(by_choice, parts).to(x.dtype)
        mixed = exact.moe_combine(by_choice.view(tokens, choices, -1), weights)
        return mixed if ranks == 1 else sglang_ranks.of_first_rank(mixed)


def _whole(partial: torch.Tensor, parts: int) -> torch.Tensor:
    """fp32 outputs of all experts, of which each rank has some, as `parts` partial sums on ranks that follow each other
    (SGLang's initialize_model_parallel). An expert's are zero on all other ranks, so adding those changes no value."""
    from sglang.srt.runtime_context import get_parallel

    by_rank = sglang_ranks.gathered(partial, get_parallel().tp_group)
    by_expert_rank = [exact.combine_leaves(by_rank[at : at + parts]) for at in range(0, len(by_rank), parts)]
    return torch.stack(by_expert_rank).sum(0)
