"""Metrics of a training step: of the whole batch, equal on every rank of the last stage, and of several updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

GAP_LIMIT = 1e-5
"""Log-prob gap in fp32 above which another set of experts must explain a token."""


def gap_metrics(
    logprobs: torch.Tensor,
    rollout: torch.Tensor,
    measured: torch.Tensor,
    other_routes: torch.Tensor,
    other_routes_before: torch.Tensor,
    comparable: torch.Tensor,
) -> dict[str, tuple[str, torch.Tensor]]:
    """The log-prob gap |trainer - engine| over the `measured` tokens; all inputs [T].

    `other_routes`: the engine chose another set of experts at this position; `other_routes_before`: here or earlier in
    the sequence; `comparable`: the engine's choice is known, or the model has no experts. Returns metric -> (reduction,
    value); the caller reduces over data-parallel ranks.
    """
    gap = (logprobs - rollout).abs().double()[measured]
    above = gap > GAP_LIMIT
    explained, known = other_routes_before[measured], comparable[measured]
    return {
        "gap/sum": ("sum", gap.sum()),
        "gap/max": ("max", gap.max() if len(gap) else gap.new_zeros(())),
        "gap/tokens": ("sum", measured.sum().double()),
        "gap/tokens_above_1e-5": ("sum", above.sum().double()),
        "gap/tokens_other_routes": ("sum", (above & explained).sum().double()),
        "gap/tokens_unexplained": ("sum", (above & ~explained & known).sum().double()),
        "gap/tokens_without_routes": ("sum", (above & ~known).sum().double()),
        "routes/differing": ("sum", other_routes[measured].sum().double()),
    }


def mismatch_sums(
    logprobs: torch.Tensor, rollout: torch.Tensor, trained: torch.Tensor
) -> dict[str, tuple[str, torch.Tensor]]:
    """Sums from which `mismatch_metrics` computes: the present policy against the engine that sampled, over all
    `trained` tokens, of whatever version; all inputs [T]. Metric -> (reduction, value)."""
    difference = (logprobs - rollout).double()[trained]
    # Beyond it a token's weight would be all there is: e^20 is 5e8.
    ratio = difference.clamp(max=20).exp()
    gap = difference.abs()
    return {
        "mismatch/mean": ("sum", gap.sum()),
        "mismatch/max": ("max", gap.max() if len(gap) else gap.new_zeros(())),
        "mismatch/k3": ("sum", (torch.expm1(difference.clamp(max=20)) - difference).sum()),
        "mismatch/ratio": ("sum", ratio.sum()),
        "mismatch/ratio_squared": ("sum", ratio.square().sum()),
        "mismatch/tokens": ("sum", trained.sum().double()),
    }


def mismatch_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Mean and maximum of |policy - engine| in log-probs, KL(engine || policy) by k3, mean ratio policy / engine, and
    the effective sample size (sum of ratios)^2 / (n x sum of squared ratios): the share of tokens that importance
    weights would leave, 1 where both agree. Other metrics stay as they are; without these sums nothing changes."""
    metrics = dict(sums)
    if "mismatch/tokens" not in metrics:
        return metrics
    tokens, squared = metrics.pop("mismatch/tokens"), metrics.pop("mismatch/ratio_squared")
    total = metrics["mismatch/ratio"]
    for name in ("mismatch/mean", "mismatch/k3", "mismatch/ratio"):
        metrics[name] = metrics[name] / tokens if tokens else float("nan")
    metrics["mismatch/ess"] = total**2 / (tokens * squared) if tokens else float("nan")
    return metrics


def reduce(values: dict[str, tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Reduce each value over `group` by its own reduction; two collectives in all."""
    out: dict[str, float] = {}
    for kind, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        names = [name for name, (reduction, _) in values.items() if reduction == kind]
        if names:
            stacked = torch.stack([values[name][1].double() for name in names])
            dist.all_reduce(stacked, op=op, group=group)
            out.update(zip(names, stacked.tolist(), strict=True))
    return out


LAST = frozenset({"optim/lr", "critic/lr"})
"""Metrics of which the newest value stands for the step."""
COUNTS = frozenset(f"{of}/{name}" for of in ("optim", "critic") for name in ("skipped", "zero_gradient"))
"""Metrics that count something and add up."""


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates, in order.

    Counts add up, maxima (`.../max`, `..._max`) stay maxima, the learning rate is the last one. All others are means
    over the updates that have them: each update's loss has its own denominators, and each moved the weights once.
    """
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {name: _combined(name, [metrics[name] for metrics in updates if name in metrics]) for name in names}


def _combined(name: str, values: list[float]) -> float:
    if name in LAST:
        return values[-1]
    if name in COUNTS:
        return sum(values)
    if name.endswith(("/max", "_max")):
        return max(values)
    return sum(values) / len(values)
