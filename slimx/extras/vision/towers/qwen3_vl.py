"""Vision tower of Qwen3-VL, which Qwen3.5 took over without its deepstack mergers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from slimx.layout.maps import Blocks, Fused, InterleaveQKV, Pad
from slimx.layout.table import Row
from slimx.models.fields import HfConfig

PREFIX = "visual."
"""Prefix of the tower's parameters in trainers and in SGLang."""
PROJECTOR: tuple[str, ...] = (f"{PREFIX}merger.", f"{PREFIX}deepstack_merger_list.")
"""Prefixes of the parameters that map the tower's output to embeddings."""
_CHECKPOINT = "model.visual."
_BRIDGE_NAMES = (
    (r"^blocks\.", "decoder.layers."),
    (r"\.attn\.qkv\.", ".self_attention.linear_qkv."),
    (r"\.attn\.proj\.", ".self_attention.linear_proj."),
    (r"\.norm1\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.norm2\.", ".mlp.linear_fc1.layer_norm_"),
    (r"^deepstack_merger_list\.", "decoder.deepstack_merger_list."),
    (r"\.norm\.", ".patch_norm."),
)
"""Patterns of the parts of a parameter's name that Megatron-Bridge replaces (qwen3_vl_bridge.py, 067f987), with their
replacements."""


def rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the trainer's weight-table rows of the tower that `vision`, the object vision_config, describes."""
    return tuple(
        Row(PREFIX + name, ((_CHECKPOINT + name, shape),), stage="first") for name, shape in _parameters(vision)
    )


def engine_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns SGLang's weight-table rows of the tower (`Qwen3VLMoeVisionModel`)."""
    return tuple(_served(row, vision["num_heads"]) for row in rows(vision))


def bridge_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the rows of the tensors that Megatron-Bridge stores in place of those in `rows`, in the same order
    (`Qwen3VLVisionModel`)."""
    return tuple(_bridged(row, vision["num_heads"]) for row in rows(vision))


def _bridged(row: Row, heads: int) -> Row:
    module, _, kind = row.name.removeprefix(PREFIX).rpartition(".")
    if module.endswith("attn.qkv"):
        size = row.sources[0][1][0] // 3
        row = replace(row, map=Fused(InterleaveQKV(heads, heads, size // heads), (size,) * 3))
    name = f"{module}.{kind}"
    for pattern, replacement in _BRIDGE_NAMES:
        name = re.sub(pattern, replacement, name)
    return replace(row, name="vision_model." + name)


def _served(row: Row, heads: int) -> Row:
    """Returns the row of SGLang's parameter that contains the same tensor as the trainer's `row`."""
    module, _, kind = row.name.rpartition(".")
    if module.endswith("attn.qkv"):
        size = row.sources[0][1][0] // 3
        split = Fused(Blocks((heads,) * 3), (size,) * 3)
        return replace(row, name=f"{module}_proj.{kind}", map=split, axis=0, group="attention")
    if module.endswith("pos_embed"):
        return replace(row, map=Pad(64), axis=0, group="attention")
    if module.endswith("linear_fc1"):
        return replace(row, axis=0, group="attention")
    if module.endswith(("linear_fc2", "attn.proj")) and kind == "weight":
        return replace(row, axis=1, group="attention")
    return row


def _parameters(vision: HfConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each of the tower's parameters."""
    size = vision["hidden_size"]
    inner = vision["intermediate_size"]
    merged = size * vision["spatial_merge_size"] ** 2
    out = vision["out_hidden_size"]
    patch = vision["patch_size"]
    kernel = (vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield from _linear("patch_embed.proj", (size, *kernel))
    yield "pos_embed.weight", (vision["num_position_embeddings"], size)
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}."
        yield from _linear(block + "norm1", (size,))
        yield from _linear(block + "attn.qkv", (3 * size, size))
        yield from _linear(block + "attn.proj", (size, size))
        yield from _linear(block + "norm2", (size,))
        yield from _linear(block + "mlp.linear_fc1", (inner, size))
        yield from _linear(block + "mlp.linear_fc2", (size, inner))
    mergers = {"merger": size}
    for index in range(len(vision.get("deepstack_visual_indexes") or ())):
        mergers[f"deepstack_merger_list.{index}"] = merged
    for merger, normed in mergers.items():
        yield from _linear(f"{merger}.norm", (normed,))
        yield from _linear(f"{merger}.linear_fc1", (merged, merged))
        yield from _linear(f"{merger}.linear_fc2", (out, merged))


def _linear(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
