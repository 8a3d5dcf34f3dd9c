"""Digests by which engine and trainer are compared layer by layer: one of each token's row, by point of the model."""

from __future__ import annotations

import torch
import xxhash

OUTPUT = "output"
"""The residual stream before the last norm."""


def attention_point(layer: int) -> str:
    """The residual stream before the attention of `layer`, from 0."""
    return f"{layer}.attention"


def mlp_point(layer: int) -> str:
    """The residual stream before the experts or the MLP of `layer`."""
    return f"{layer}.mlp"


def row_digests(x: torch.Tensor) -> list[str]:
    """XXH3 of 64 bits of every row's bytes: x [..., n] -> as many hexadecimal digests as there are rows."""
    rows = x.detach().cpu().reshape(-1, x.shape[-1]).contiguous().view(torch.uint8).numpy()
    return [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in rows]


def first_difference(engine: dict[str, list[str]], trainer: dict[str, list[str]]) -> tuple[str, int] | None:
    """Find the first part of the model whose result differs for some token, and for how many tokens; None if the
    residual stream is the same up to the last norm.

    Both: digests of rows by point. An engine may have noted other tokens before and after those of the trainer, such as
    a health check's: where they lie is found by their embeddings."""
    layers = sum(point.endswith(".attention") for point in trainer)
    wanted, noted = trainer[attention_point(0)], engine[attention_point(0)]
    tokens = len(wanted)
    first = next((at for at in range(len(noted) - tokens + 1) if noted[at : at + tokens] == wanted), None)
    if first is None:
        return "the embedding", tokens
    parts = []
    for layer in range(layers):
        after = attention_point(layer + 1) if layer + 1 < layers else OUTPUT
        parts += [(mlp_point(layer), f"the attention of layer {layer}"), (after, f"the MLP of layer {layer}")]
    for point, part in parts:
        pairs = zip(engine[point][first : first + tokens], trainer[point][:tokens], strict=True)
        if differing := sum(a != b for a, b in pairs):
            return part, differing
    return None
