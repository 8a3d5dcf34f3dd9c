"""Vision tower of Kimi-K2.5 (MoonViT-3D) and its projector. Queries, keys and values are one tensor in checkpoints, in
engines, and in the trainer's module (`slimx.extras.vision.moonvit`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slimx.extras.vision.towers.rows import Matrices, linear, split_qkv, tower_rows
from slimx.layout.maps import Copy
from slimx.layout.table import Row
from slimx.models.fields import HfConfig

PREFIX = "visual."
"""Prefix of the tower's parameters in trainers."""
PROJECTOR: tuple[str, ...] = (f"{PREFIX}mm_projector.",)
"""Prefixes of the parameters that map the tower's output to embeddings."""
_PUBLISHED = (
    (".norm1.", ".norm0."),
    (".norm2.", ".norm1."),
    (".mlp.fc1.", ".mlp.fc0."),
    (".mlp.fc2.", ".mlp.fc1."),
    (".attn.qkv.", ".wqkv."),
    (".attn.proj.", ".wo."),
    ("vision_tower.layers.", "vision_tower.encoder.blocks."),
    ("vision_tower.final_layernorm.", "vision_tower.encoder.final_layernorm."),
    (".pos_emb.position_embeddings", ".pos_emb.weight"),
    ("mm_projector.in_proj.", "mm_projector.proj.0."),
    ("mm_projector.out_proj.", "mm_projector.proj.2."),
)
"""Parts of transformers' names with what replaces them in checkpoints' names, in the order of replacement."""
_SERVED = (
    (".wqkv.", ".attn.qkv."),
    (".wo.", ".attn.proj."),
    ("mm_projector.proj.0.", "mm_projector.linear_1."),
    ("mm_projector.proj.2.", "mm_projector.linear_2."),
)
"""Parts of checkpoints' names with what replaces them in SGLang's names."""


def rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the trainer's weight-table rows of the tower that `vision` describes."""
    stored = tower_rows(_parameters(vision), PREFIX, "")
    return tuple(_published(row) for row in stored)


def _published(row: Row) -> Row:
    """Returns a row whose source has transformers' name with the name that checkpoints have."""
    ((name, shape),) = row.sources
    row = replace(row, sources=((_renamed(name, _PUBLISHED), shape),))
    return replace(row, map=Matrices(shape[0])) if len(shape) == 3 else row


def bridge_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns the rows of the tensors that Megatron-Bridge stores in place of those in `rows`, in the same order: those
    of checkpoints."""
    return tuple(replace(row, name=row.sources[0][0]) for row in rows(vision))


def engine_rows(vision: HfConfig) -> tuple[Row, ...]:
    """Returns SGLang's weight-table rows of the tower (`MoonViT3dPretrainedModel`, `K2VLMultiModalProjector`)."""
    return tuple(_served(row, vision["num_heads"]) for row in rows(vision))


def _served(row: Row, heads: int) -> Row:
    """Returns the row of SGLang's parameter that contains the same tensor as the trainer's `row`."""
    row = replace(row, name=_renamed(row.sources[0][0], _SERVED), map=Copy())
    if ".attn.qkv." in row.name:
        return split_qkv(row, heads, "attention")
    if row.name.endswith(".attn.proj.weight"):
        return replace(row, axis=1, group="attention")
    return row


def _renamed(name: str, parts: tuple[tuple[str, str], ...]) -> str:
    for part, other in parts:
        name = name.replace(part, other)
    return name


def _parameters(vision: HfConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name in transformers and shape of each of the tower's parameters."""
    size = vision["hidden_size"]
    inner = vision["intermediate_size"]
    patch = vision["patch_size"]
    merged = size * vision["spatial_merge_size"] ** 2
    yield "vision_tower.patch_embed.pos_emb.position_embeddings", (*vision["positions"], size)
    yield from linear("vision_tower.patch_embed.proj", size, 3, patch, patch)
    for layer in range(vision["depth"]):
        block = f"vision_tower.layers.{layer}."
        yield from linear(block + "norm1", size)
        yield from linear(block + "norm2", size)
        yield from linear(block + "attn.qkv", 3 * size, size)
        yield from linear(block + "attn.proj", size, size)
        yield from linear(block + "mlp.fc1", inner, size)
        yield from linear(block + "mlp.fc2", size, inner)
    yield from linear("vision_tower.final_layernorm", size)
    yield from linear("mm_projector.pre_norm", size)
    yield from linear("mm_projector.in_proj", merged, merged)
    yield from linear("mm_projector.out_proj", vision["out_hidden_size"], merged)
