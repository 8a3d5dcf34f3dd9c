"""Routing of tokens to experts, and combination of expert outputs, in exact mode."""

from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.extras.exact.operations.forward import forward_on
from slimx.extras.exact.operations.forward.elementary import exp, row_sum, sigmoid


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects each token's experts from `logits` [T, experts]; returns their weights [T, top_k] fp32 and their ids [T,
    top_k] int64, ascending.

    `score`: "softmax" over all experts, or "sigmoid". The experts with the largest scores (with softmax: logits) are
    selected; of experts with equal scores, the one with the lower id. `bias` [experts] is added only for the selection.
    With `groups` > 1, only experts in the `top_groups` groups with the largest sums of their two highest scores are
    eligible (DeepSeek-V3, 2412.19437). The weights are the scores, divided by their sum in order of id if
    `renormalize`, and finally multiplied by `factor`.
    """
    if score not in ("softmax", "sigmoid"):
        raise SlimxError(
            f"the router score {score!r} is unknown; use softmax or sigmoid", code="exact.router_score", about=score
        )
    logits = logits.float()
    scores = _Scores.apply(logits, score)
    with torch.no_grad():
        choice = logits if score == "softmax" and bias is None else scores
        ids = _choose(choice if bias is None else choice + bias.float(), top_k, groups, top_groups)
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights[:, :1]
        for k in range(1, top_k):
            total = total + weights[:, k : k + 1]
        weights = weights / (total + 1e-20 if score == "sigmoid" else total)
    return weights * factor, ids


def _choose(choice: torch.Tensor, top_k: int, groups: int, top_groups: int) -> torch.Tensor:
    """Returns the ids [T, top_k], ascending, of the experts with the largest values in `choice` [T, experts]. Stable
    sorting keeps experts with equal values in order of id. `groups`, `top_groups`: as in `route`."""
    if groups > 1:
        by_group = choice.view(len(choice), groups, -1)
        best = by_group.sort(dim=2, descending=True).values[..., :2]
        total = best[..., 0] if best.shape[2] == 1 else best[..., 0] + best[..., 1]
        module_for = total.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros_like(total, dtype=torch.bool).scatter(1, module_for, True)
        choice = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    return choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k].sort(dim=1).values


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, score: str) -> torch.Tensor:
        if score == "sigmoid":
            scores = sigmoid(logits)
        else:
            weight = exp(logits - logits.amax(1, keepdim=True))
            scores = weight / row_sum(weight)[:, None]
        ctx.save_for_backward(scores)
        ctx.score = score
        return scores

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (scores,) = ctx.saved_tensors
        if ctx.score == "sigmoid":
            return gradient * scores * (1 - scores), None
        return scores * (gradient - (gradient * scores).sum(1, keepdim=True)), None


def moe_combine(outputs: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
    """Returns each token's weighted sum of expert outputs, [T, hidden], added in fp32 in order of expert id and rounded
    once to outputs' dtype.

    `outputs` [T, top_k, hidden] and `weights` [T, top_k] are in ascending order of expert id. `shared` [T, hidden]:
    output of the shared experts, added last, before rounding.
    """
    return _Combine.apply(outputs, weights, shared)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(outputs, weights)
        ctx.shared = None if shared is None else shared.dtype
        return forward_on(outputs.device).combine(outputs.contiguous(), weights.float().contiguous(), shared)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        outputs, weights = ctx.saved_tensors
        wide = gradient.float()[:, None]
        weights_gradient = (wide * outputs.float()).sum(2).to(weights.dtype)
        shared_gradient = None if ctx.shared is None else gradient.to(ctx.shared)
        return (wide * weights.float()[..., None]).to(outputs.dtype), weights_gradient, shared_gradient
