"""Traces by which engine and trainer are compared layer by layer (`slimx doctor --gap --layers`): digests of the
residual stream, one of each token's row, by point of the model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

OUTPUT = "output"
"""The residual stream before the last norm."""
_NORMS = re.compile(r"model\.(?:layers\.(\d+)\.(input|post_attention)_layernorm|norm)")
"""Names of norms in SGLang's models."""


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


class EngineTrace:
    """Traces the residual stream of SGLang's `model` from now until `end`: digests of rows by point, in the order of
    arrival. Written for sglang 0.5.23 and decoders of Llama's shape, whose norms take the residual beside the layer's
    output."""

    def __init__(self, model: torch.nn.Module):
        self.rows: dict[str, list[str]] = defaultdict(list)
        self._handles = []
        for name, module in model.named_modules():
            if found := _NORMS.fullmatch(name):
                layer, which = found.groups()
                point = OUTPUT if layer is None else (attention_point if which == "input" else mlp_point)(int(layer))
                self._handles.append(module.register_forward_hook(self._note(point)))

    def _note(self, point: str) -> Any:
        def hook(module: Any, given: tuple, result: Any) -> None:
            # With a residual a norm returns the sum as well; without one it is given the stream itself.
            stream = result[1] if isinstance(result, tuple) else given[0]
            if len(stream):
                self.rows[point] += row_digests(stream)

        return hook

    def end(self) -> dict[str, list[str]]:
        for handle in self._handles:
            handle.remove()
        return dict(self.rows)


@contextmanager
def trainer_trace(modules: list[Any]) -> Iterator[dict[str, list[str]]]:
    """Collect digests of the residual stream of `modules` (GPT models of this rank), by point, inside the block."""
    rows: dict[str, list[str]] = defaultdict(list)
    handles = []

    def note(norm: torch.nn.Module, point: str) -> None:
        handles.append(norm.register_forward_pre_hook(lambda _, given: rows[point].extend(row_digests(given[0]))))

    for model in modules:
        for layer in model.decoder.layers:
            note(layer.input_layernorm, attention_point(layer.layer_number - 1))
            note(layer.pre_mlp_layernorm, mlp_point(layer.layer_number - 1))
        if model.decoder.final_layernorm is not None:
            note(model.decoder.final_layernorm, OUTPUT)
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


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
