"""Vision-language models in SGLang: where an engine's parameters store the tensors of the vision tower. Written for
sglang 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from slimx.adapters.sglang.weights import places
from slimx.adapters.sglang.weights.layout import (
    ServedParameter,
    ServedPiece,
    columns_split,
    qkv_of_one,
    rank_in,
    rows_split,
    vocabulary,
    whole,
)
from slimx.layout.maps import Rect

_UNNESTED = ("Qwen2_5_VLForConditionalGeneration",)
"""SGLang's classes whose checkpoints name tensors as the class does."""

_KIMI = "KimiK25ForConditionalGeneration"
"""SGLang's class of Kimi-K2.5, whose language model has the same prefix as in checkpoints."""
_KIMI_NAMES = (
    (".attn.qkv_proj.", ".wqkv."),
    (".attn.proj.", ".wo."),
    ("mm_projector.linear_1.", "mm_projector.proj.0."),
    ("mm_projector.linear_2.", "mm_projector.proj.2."),
)
"""Parts of the names of its tower's parameters with what replaces them in checkpoints' names."""


def published_name(model: nn.Module, name: str) -> str:
    """Returns the checkpoint's name of the parameter `name` of `model`, except for the renaming of fused tensors: the
    language model of a model with a vision tower is nested in another model."""
    if type(model).__name__ == _KIMI:
        return _published_kimi(name)
    if getattr(model, "visual", None) is None:
        return name
    kind = type(model).__name__
    if name.startswith("visual."):
        named = name.replace(".attn.qkv_proj.", ".attn.qkv.")
        return named if kind in _UNNESTED else f"model.{named}"
    if kind in _UNNESTED:
        return name
    return re.sub(r"^model\.", "model.language_model.", name)


def _published_kimi(name: str) -> str:
    for part, other in _KIMI_NAMES:
        name = name.replace(part, other)
    return name


def tower_gate_up(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of gate_proj, then up_proj, of a gated MLP in the tower, each followed by padding."""
    owner = cast(places.Linear, served.owner)
    rank = rank_in(owner.tp_group)
    start = 0
    for name, size, shard in zip(("gate", "up"), owner.output_sizes, owner.output_partition_sizes, strict=True):
        total = _unpadded(served, size)
        filled = max(0, min(shard, total - rank * shard))
        rects = (Rect(0, rank * shard, 0, filled, served.cols, start, 0),) if filled else ()
        yield ServedPiece(f"{{at}}.{name}_proj.{{kind}}", (total, *served.parameter.shape[1:]), rects)
        yield ServedPiece(None, (), (Rect(0, 0, 0, shard - filled, served.cols, start + filled, 0),))
        start += shard


def tower_down(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's columns of down_proj of a gated MLP in the tower, then padding."""
    owner = cast(places.Linear, served.owner)
    rank = rank_in(owner.tp_group)
    rows, shard = served.parameter.shape
    total = _unpadded(served, owner.input_size)
    filled = max(0, min(shard, total - rank * shard))
    rects = (Rect(0, 0, rank * shard, rows, filled, 0, 0),) if filled else ()
    yield ServedPiece("{name}", (rows, total), rects)
    yield ServedPiece(None, (), (Rect(0, 0, 0, rows, shard - filled, 0, filled),))


def _unpadded(served: ServedParameter, size: int) -> int:
    """Returns the inner size in the checkpoint of an MLP that SGLang built with the inner size `size`."""
    if type(served.model).__name__ not in _UNNESTED:
        return size
    inner: int = cast(Any, served.model).config.vision_config.intermediate_size
    return inner


_TOWER = r"(model\.)?visual\."
_MOONVIT = r"vision_tower\."
ROWS = (
    (r"language_model\.(model\.embed_tokens|lm_head)\.weight", vocabulary),
    (r"language_model\.model\.norm\.weight", whole),
    (_MOONVIT + r".+\.wqkv\.(weight|bias)", qkv_of_one),
    (_MOONVIT + r".+\.wo\.weight", columns_split),
    (_MOONVIT + r".+|mm_projector\..+", whole),
    (_TOWER + r"pos_embed\.weight", vocabulary),
    (_TOWER + r".+\.attn\.qkv\.(weight|bias)", qkv_of_one),
    (rf"(?P<at>{_TOWER}.+)\.gate_up_proj\.(?P<kind>weight|bias)", tower_gate_up),
    (_TOWER + r".+\.down_proj\.weight", tower_down),
    (_TOWER + r".+\.(linear_fc1|mlp\.0)\.(weight|bias)", rows_split),
    (_TOWER + r".+\.(attn\.proj|linear_fc2|mlp\.2)\.weight", columns_split),
    (_TOWER + r".+", whole),
)
"""Pairs of a regular expression for parameter names and the function that locates the tensors of a matching parameter;
they extend the table in `slimx.adapters.sglang.weights.layout`."""
GAPS = ()
REPLACEMENTS = ()
