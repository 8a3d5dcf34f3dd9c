"""Digests of the residual stream in a server, for the comparison with a trainer (`slimx doctor --gap --layers`).

Written for sglang 0.5.23 and decoders of Llama's shape: the norms of a layer are `input_layernorm` and
`post_attention_layernorm`, and take the residual beside the layer's output.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.extras.doctor.row_digests import OUTPUT, attention_point, mlp_point, row_digests

_NORMS = re.compile(r"model\.(?:layers\.(\d+)\.(input|post_attention)_layernorm|norm)")


class Trace:
    """A trace of a model's hidden states from now until `end`: digests of rows by point, in the order of arrival."""

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


def begin(runner: Any) -> dict[str, Any]:
    """Begin to note what goes through the model (verb "begin_trace")."""
    runner.slimx_trace = Trace(runner.model)
    return {}


def end(runner: Any) -> dict[str, list[str]]:
    """End it (verb "end_trace"); return digests of rows by point."""
    trace = runner.__dict__.pop("slimx_trace", None)
    if trace is None:
        raise SlimxError("no trace was begun in this process")
    return trace.end()
