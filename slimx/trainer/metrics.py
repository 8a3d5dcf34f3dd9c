"""Per-token results of a training step -> metrics of the whole batch, equal on every rank of the last stage."""

from __future__ import annotations

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
) -> dict[str, tuple[str, torch.Tensor]]:
    """The log-prob gap |trainer - engine| over the `measured` tokens; all inputs [T].

    `other_routes`: the engine chose another set of experts at this position; `other_routes_before`: here or earlier in
    the sequence. Returns metric -> (reduction, value); the caller reduces over data-parallel ranks.
    """
    gap = (logprobs - rollout).abs().double()[measured]
    above = gap > GAP_LIMIT
    explained = other_routes_before[measured]
    return {
        "gap/sum": ("sum", gap.sum()),
        "gap/max": ("max", gap.max() if len(gap) else gap.new_zeros(())),
        "gap/tokens": ("sum", measured.sum().double()),
        "gap/tokens_above_1e-5": ("sum", above.sum().double()),
        "gap/tokens_other_routes": ("sum", (above & explained).sum().double()),
        "gap/tokens_unexplained": ("sum", (above & ~explained).sum().double()),
        "routes/differing": ("sum", other_routes[measured].sum().double()),
    }


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
