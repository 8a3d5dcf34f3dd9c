"""Vision tower of Qwen2.5-VL, with attention in windows and gated MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slimx.extras.vision.towers.rows import gated, gated_engine_rows, linear, split_qkv, tower_rows
from slimx.layout.table import Row
from slimx.models.fields import HfConfig

PREFIX = "visual."
"""Prefix of the tower's parameters in trainers, in checkpoints and in SGLang."""
PROJECTOR: tuple[str, ...] = (f"{PREFIX}merger.",)
"""Prefixes of the parameters that map the tower's output to embeddings."""
_MULTIPLE = 8
"""SGLang pads the inner size of the MLPs to a multiple of this number."""


def rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the trainer's weight-table rows of the tower that `vision`, the object vision_config, describes."""
    return tower_rows(_parameters(vision), PREFIX, PREFIX)


def bridge_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the rows of the tensors that Megatron-Bridge stores in place of those in `rows`: the same, because its
    tower is that of transformers, too."""
    return rows(vision)


def engine_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns SGLang's weight-table rows of the tower (`Qwen2_5_VisionTransformer`), which all ranks of an engine
    split."""
    return tuple(_served(row, vision["num_heads"]) for row in gated_engine_rows(rows(vision), _MULTIPLE, None))


def _served(row: Row, heads: int) -> Row:
    """Returns the row of SGLang's parameter that contains the same tensor as the trainer's `row`."""
    module, _, kind = row.name.rpartition(".")
    if module.endswith("attn.qkv"):
        return split_qkv(row, heads, None)
    if module.endswith("merger.mlp.0"):
        return replace(row, axis=0)
    if module.endswith(("attn.proj", "merger.mlp.2")) and kind == "weight":
        return replace(row, axis=1)
    return row


def _parameters(vision: HfConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each of the tower's parameters."""
    size = vision["hidden_size"]
    merged = size * vision["spatial_merge_size"] ** 2
    patch = vision["patch_size"]
    # Published files call the number of channels in_chans, which transformers and SGLang ignore.
    kernel = (vision.get("in_channels", 3), vision["temporal_patch_size"], patch, patch)
    yield from linear("patch_embed.proj", size, *kernel, bias=False)
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}."
        yield from linear(block + "norm1", size, bias=False)
        yield from linear(block + "norm2", size, bias=False)
        yield from linear(block + "attn.qkv", 3 * size, size)
        yield from linear(block + "attn.proj", size, size)
        yield from gated(block + "mlp", size, vision["intermediate_size"], bias=True)
    yield from linear("merger.ln_q", size, bias=False)
    yield from linear("merger.mlp.0", merged, merged)
    yield from linear("merger.mlp.2", vision["out_hidden_size"], merged)
