"""Digests of the residual stream in a trainer's pass, for the comparison with an engine (`slimx doctor --gap
--layers`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slimx.numerics.rows import OUTPUT, attention_point, mlp_point, row_digests


@contextmanager
def traced(modules: list[Any]) -> Iterator[dict[str, list[str]]]:
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
