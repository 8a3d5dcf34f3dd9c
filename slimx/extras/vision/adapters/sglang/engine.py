"""Vision-language models in SGLang: where an engine's parameters store the tensors of the vision tower and stacked
experts. Written for sglang 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from torch import nn

from slimx.adapters.sglang.weights import places
from slimx.adapters.sglang.weights.layout import (
    ServedParameter,
    ServedPiece,
    columns_split,
    gate_and_up,
    logical_experts,
    qkv_of_one,
    rows_split,
    vocabulary,
    whole,
)
from slimx.layout.maps import Rect


def published_name(model: nn.Module, name: str) -> str:
    """Returns the checkpoint's name of the parameter `name` of `model`, except for the renaming of fused tensors: the
    language model of a model with a vision tower is nested in another model."""
    if getattr(model, "visual", None) is None:
        return name
    if name.startswith("visual."):
        return f"model.{name}".replace(".attn.qkv_proj.", ".attn.qkv.")
    return re.sub(r"^model\.", "model.language_model.", name)


def stacked_gate_up(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields the fused expert parameter w13 as `experts_gate_up` does, for checkpoints that stack the gate and up
    projections of all experts in one tensor."""
    owner = cast(places.Experts, served.owner)
    inner = owner.intermediate_size_per_partition
    total = inner * owner.moe_tp_size
    rects = []
    logical, experts = logical_experts(served)
    for slot, expert in enumerate(logical):
        for index, part in enumerate(gate_and_up(owner)):
            row = (2 * expert + part) * total + owner.moe_tp_rank * inner
            rects.append(Rect(0, row, 0, inner, served.cols, (2 * slot + index) * inner, 0))
    shape = (experts, 2 * total, served.cols)
    yield ServedPiece("{mlp}.experts.gate_up_proj", shape, tuple(rects))


def stacked_down(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields the expert parameter w2 as `experts_down` does, for checkpoints that stack the down projections of all
    experts in one tensor."""
    owner = cast(places.Experts, served.owner)
    inner = owner.intermediate_size_per_partition
    hidden = owner.hidden_size
    rects = []
    logical, experts = logical_experts(served)
    for slot, expert in enumerate(logical):
        rects.append(Rect(0, expert * hidden, owner.moe_tp_rank * inner, hidden, inner, slot * hidden, 0))
    shape = (experts, hidden, inner * owner.moe_tp_size)
    yield ServedPiece("{mlp}.experts.down_proj", shape, tuple(rects))


_TOWER = r"model\.visual\."
_EXPERTS = r"(?P<mlp>model\.language_model\..+\.mlp)\.experts\."
ROWS = (
    (_TOWER + r"pos_embed\.weight", vocabulary),
    (_TOWER + r".+\.attn\.qkv\.(weight|bias)", qkv_of_one),
    (_TOWER + r".+\.linear_fc1\.(weight|bias)", rows_split),
    (_TOWER + r".+\.(attn\.proj|linear_fc2)\.weight", columns_split),
    (_TOWER + r".+", whole),
    (_EXPERTS + r"w13_weight", stacked_gate_up),
    (_EXPERTS + r"w2_weight", stacked_down),
)
"""Pairs of a regular expression for parameter names and the function that locates the tensors of a matching parameter;
they extend the table in `slimx.adapters.sglang.weights.layout`."""
GAPS = ()
REPLACEMENTS = ()
