"""Metrics of a training step: reduces metrics over micro-batches and ranks, and combines the metrics of several
updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

Sums = dict[str, tuple[str, torch.Tensor]]
"""Metric name -> reduction over ranks ("sum" or "max"), and the metric's value on this rank."""

GAP_LIMIT = 1e-5
"""Log-prob gap in fp32 above which trainer and engine have probably used different experts for a token."""


def summed(metrics: Sequence[Mapping[str, torch.Tensor]]) -> Sums:
    """Sums each metric over all micro-batches of this rank. The caller must also sum the results over ranks."""
    out: Sums = {}
    for name, first in metrics[0].items():
        total = first
        for later in metrics[1:]:
            total = total + later[name]
        out[name] = ("sum", total)
    return out


def gap_metrics(
    logprobs: torch.Tensor,
    rollout: torch.Tensor,
    measured: torch.Tensor,
    other_routes: torch.Tensor,
    other_routes_before: torch.Tensor,
    comparable: torch.Tensor,
) -> Sums:
    """Computes statistics of the log-prob gap |trainer - engine| over those of this rank's tokens that are in the mask
    `measured`. All arguments have shape [T]. `rollout`: the engine's log-probs. `other_routes`: True where the engine
    chose different experts for this token. `other_routes_before`: True where the engine chose different experts for
    this or an earlier token of the sequence. `comparable`: True where the engine's experts are known, or the model has
    none. The caller reduces the results over ranks."""
    gap = (logprobs - rollout).abs().double()[measured]
    above = gap > GAP_LIMIT
    explained = other_routes_before[measured]
    known = comparable[measured]
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


def mismatch_sums(logprobs: torch.Tensor, rollout: torch.Tensor, trained: torch.Tensor) -> Sums:
    """Returns the sums from which `mismatch_metrics` computes how much the current policy differs from the engines that
    sampled the tokens. The sums are over all tokens in the mask `trained`, regardless of the weight version that
    sampled them. All arguments have shape [T]. `rollout`: the engine's log-probs."""
    difference = (logprobs - rollout).double()[trained]
    # Bounded, because a single token with a larger ratio than e^20 (5e8) would dominate the mean of all tokens.
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
    """Replaces the results of `mismatch_sums`, reduced over ranks, with metrics: mean and maximum of |log-prob of
    policy - log-prob of engine|, KL(engine || policy) estimated by k3, the mean ratio policy / engine, and the
    effective sample size (sum of ratios)^2 / (n x sum of squared ratios), which is the fraction of n tokens that
    importance weighting would effectively use (1 if both agree). Other metrics are unchanged."""
    metrics = dict(sums)
    if "mismatch/tokens" not in metrics:
        return metrics
    tokens = metrics.pop("mismatch/tokens")
    squared = metrics.pop("mismatch/ratio_squared")
    total = metrics["mismatch/ratio"]
    for name in ("mismatch/mean", "mismatch/k3", "mismatch/ratio"):
        metrics[name] = quotient(metrics[name], tokens)
    metrics["mismatch/ess"] = quotient(total**2, tokens * squared)
    return metrics


def quotient(value: float, count: float) -> float:
    """Returns value / count; NaN if `count` is 0, which means that nothing was measured."""
    return value / count if count else float("nan")


def reduce(values: Sums, group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces each value over the ranks of `group`, to a sum or a maximum. Needs at most two collectives in total: one
    for all sums and one for all maxima."""
    out: dict[str, float] = {}
    for kind, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        local = {}
        for name, (reduction, value) in values.items():
            if reduction == kind:
                local[name] = value.double()
        if local:
            stacked = torch.stack(list(local.values()))
            dist.all_reduce(stacked, op=op, group=group)
            out.update(zip(local, stacked.tolist(), strict=True))
    return out


LAST = frozenset({"optim/lr", "critic/lr"})
"""Metrics whose value for a step is that of the step's last update."""
COUNTS = frozenset({"optim/skipped", "optim/zero_gradient", "critic/skipped", "critic/zero_gradient"})
"""Names of the metrics that count events; they are summed over a step's updates."""


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines the metrics of a step's updates.

    Counts (`COUNTS`) are summed; of maxima (`.../max`, `..._max`), the largest is kept; learning rates (`LAST`) are
    those of the last update. Any other metric is the unweighted mean over the updates that report it, because each
    update normalizes its loss separately and changes the weights once."""
    values: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: _combined(name, parts) for name, parts in values.items()}


def _combined(name: str, values: list[float]) -> float:
    if name in LAST:
        return values[-1]
    if name in COUNTS:
        return sum(values)
    if name.endswith(("/max", "_max")):
        return max(values)
    return sum(values) / len(values)
