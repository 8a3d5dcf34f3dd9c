"""Vision tower of GLM-4.5V, with interpolated position embeddings, gated MLPs, and a gated MLP as its projector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slimx.extras.vision.towers.rows import gated, gated_engine_rows, linear, split_qkv, tower_rows
from slimx.layout.table import Row
from slimx.models.fields import HfConfig

PREFIX = "visual."
"""Prefix of the tower's parameters in trainers and in SGLang."""
PROJECTOR: tuple[str, ...] = (f"{PREFIX}downsample.", f"{PREFIX}merger.")
"""Prefixes of the parameters that map the tower's output to embeddings."""


def rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the trainer's weight-table rows of the tower that `vision`, the object vision_config, describes."""
    return tower_rows(_parameters(vision), PREFIX, "model.visual.")


def bridge_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the rows of the tensors that Megatron-Bridge stores in place of those in `rows`: the same, because its
    tower is that of transformers, too."""
    return rows(vision)


def engine_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns SGLang's weight-table rows of the tower (`Glm4vVisionModel`)."""
    return tuple(_served(row, vision["num_heads"]) for row in gated_engine_rows(rows(vision), 1, "attention"))


def _served(row: Row, heads: int) -> Row:
    """Returns the row of SGLang's parameter that contains the same tensor as the trainer's `row`."""
    if ".attn.qkv." in row.name:
        return split_qkv(row, heads, "attention")
    if row.name.endswith("attn.proj.weight"):
        return replace(row, axis=1, group="attention")
    if ".post_projection_norm." in row.name:
        return replace(row, dtype="float32")
    return row


def _parameters(vision: HfConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each of the tower's parameters."""
    size = vision["hidden_size"]
    out = vision["out_hidden_size"]
    merge = vision["spatial_merge_size"]
    patch = vision["patch_size"]
    positions = (vision["image_size"] // patch) ** 2
    kernel = (vision.get("in_channels", 3), vision["temporal_patch_size"], patch, patch)
    yield "embeddings.position_embedding.weight", (positions, size)
    yield from linear("patch_embed.proj", size, *kernel)
    yield from linear("post_conv_layernorm", size, bias=False)
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}."
        yield from linear(block + "norm1", size, bias=False)
        yield from linear(block + "norm2", size, bias=False)
        yield from linear(block + "attn.qkv", 3 * size, size, bias=vision.get("attention_bias", False))
        yield from linear(block + "attn.proj", size, size, bias=False)
        yield from gated(block + "mlp", size, out, bias=False)
    yield from linear("post_layernorm", size, bias=False)
    yield from linear("downsample", out, size, merge, merge)
    yield from linear("merger.proj", out, out, bias=False)
    yield from linear("merger.post_projection_norm", out)
    yield from gated("merger", out, vision["intermediate_size"], bias=False)
