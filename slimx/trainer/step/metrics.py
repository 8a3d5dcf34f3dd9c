"""Metrics of a training step: of the complete batch, equal on every rank of the last stage, and of several updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

Sums = dict[str, tuple[str, torch.Tensor]]
"""Metric -> (reduction over ranks, "sum" or "max"; local value)."""

GAP_LIMIT = 1e-5
"""Log-prob gap in fp32 above which a token is expected to have used another set of experts."""


def summed(metrics: Sequence[Mapping[str, torch.Tensor]]) -> Sums:
    """Adds up metrics of micro-batches by name."""
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
    """Measures the log-prob gap |trainer - engine| over the `measured` tokens; all inputs [T].

    `other_routes`: the engine chose another set of experts at this position; `other_routes_before`: at this or an
    earlier position of the sequence; `comparable`: the engine's choice is known, or the model has no experts. The
    caller reduces over data-parallel ranks.
    """
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
    """Returns the inputs of `mismatch_metrics`: the current policy against the engine that sampled, over all `trained`
    tokens, of any version; all inputs [T]."""
    difference = (logprobs - rollout).double()[trained]
    # Bounded: beyond 20 a single token's weight would dominate all others; e^20 is 5e8.
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
    """Computes mean and maximum of |policy - engine| in log-probs, KL(engine || policy) by k3, mean ratio policy /
    engine, and the effective sample size (sum of ratios)^2 / (n x sum of squared ratios): the fraction of tokens that
    importance weights would leave, 1 if both agree. Other metrics, and metrics without these sums, are unchanged."""
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
    """Divides; NaN if `count` is 0, i.e. nothing was measured."""
    return value / count if count else float("nan")


def reduce(values: Sums, group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces each value over `group` by its reduction; two collectives in total."""
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
"""Metrics of a step that are those of its last update."""
COUNTS = frozenset({"optim/skipped", "optim/zero_gradient", "critic/skipped", "critic/zero_gradient"})
"""Metrics that are counts and add up."""


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines the metrics of a step's updates, in order.

    Counts add up, maxima (`.../max`, `..._max`) stay maxima, the learning rate is the last one. All others are means
    over the updates that have them: each update's loss has its denominators, and each moved the weights once.
    """
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
