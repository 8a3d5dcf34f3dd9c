"""Moves of a plan, carried out naively."""

from __future__ import annotations

import torch

from slimx.reshard.plan.copy_plan import Plan
from tests.unit.layout.layout_stand import (
    Tensors,
)


def carry_out(plan: Plan, trainers: list[Tensors]) -> list[Tensors]:
    """Move for move, element for element as `intersect.Move` defines it. No element may be written twice."""
    targets = [[[torch.zeros(t.shape, dtype=torch.int64) for t in b.tensors] for b in bs] for bs in plan.buckets]
    for move in plan.moved:
        m = {key: int(move[key]) for key in plan.moved.dtype.names}
        source = trainers[m["source"]][plan.parameters[m["parameter"]].name]
        assert tuple(source.shape) == plan.parameters[m["parameter"]].shape
        target = targets[m["target"]][m["bucket"]][m["tensor"]]
        source, target = (t.view(-1, 1) if t.dim() == 1 else t.flatten(0, -2) for t in (source, target))
        i, j = torch.arange(m["rows"])[:, None], torch.arange(m["cols"])[None]
        values = source[m["source_row"] + i * m["source_step"], m["source_col"] + j]
        place = m["row"] + i * m["row_step"], m["col"] + j
        assert not target[place].any(), "written twice"
        target[place] = values
    return [
        {
            t.name: tensor
            for b, tensors in zip(bs, made, strict=True)
            for t, tensor in zip(b.tensors, tensors, strict=True)
        }
        for bs, made in zip(plan.buckets, targets, strict=True)
    ]
