"""Digests for comparing hidden states of engine and trainer layer by layer: one digest per token and point of the
residual stream (before a layer's attention, before its MLP, before the last norm)."""

from __future__ import annotations

import torch
import xxhash

OUTPUT = "output"
"""Name of the point of the residual stream before the last norm."""


def attention_point(layer: int) -> str:
    """Returns the name of the point of the residual stream before attention in layer `layer` (counted from 0)."""
    return f"{layer}.attention"


def mlp_point(layer: int) -> str:
    """Returns the name of the point of the residual stream before the MLP or the experts in layer `layer` (counted from
    0)."""
    return f"{layer}.mlp"


def row_digests(x: torch.Tensor) -> list[str]:
    """Returns the 64-bit XXH3 digest of the bytes of each row of `x` [..., n], as hexadecimal digits."""
    rows = x.detach().cpu().reshape(-1, x.shape[-1]).contiguous().view(torch.uint8).numpy()
    return [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in rows]


def first_difference(engine: dict[str, list[str]], trainer: dict[str, list[str]]) -> tuple[str, int] | None:
    """Returns the name of the first part of the model whose result differs for some token, and the number of differing
    tokens; None if the residual stream is equal up to the last norm.

    `engine`, `trainer`: digests of the tokens' hidden states, by point of the residual stream. The engine may have
    computed other tokens before and after the trainer's, such as those of a health check, so the trainer's tokens are
    located by the digests of their embeddings."""
    layers = sum(point.endswith(".attention") for point in trainer)
    trainer_rows = trainer[attention_point(0)]
    first = _find(engine[attention_point(0)], trainer_rows)
    tokens = len(trainer_rows)
    if first is None:
        return "the embedding", tokens
    parts = []
    for layer in range(layers):
        after = attention_point(layer + 1) if layer + 1 < layers else OUTPUT
        parts += [(mlp_point(layer), f"the attention of layer {layer}"), (after, f"the MLP of layer {layer}")]
    for point, part in parts:
        pairs = zip(engine[point][first : first + tokens], trainer[point][:tokens], strict=True)
        differing = sum(a != b for a, b in pairs)
        if differing:
            return part, differing
    return None


def _find(rows: list[str], part: list[str]) -> int | None:
    """Returns the first index at which `rows` contains the sequence `part`; None if it does not."""
    for start in range(len(rows) - len(part) + 1):
        if rows[start : start + len(part)] == part:
            return start
    return None
