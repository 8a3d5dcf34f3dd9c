"""Digests of the residual stream in a server, for the comparison with a trainer (`slimx doctor --gap --layers`).

Written for sglang 0.5.23 and Llama-like decoders: the norms of a layer are `input_layernorm` and
`post_attention_layernorm`, and take the residual in addition to the layer's output."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.extras.doctor.row_digests import OUTPUT, attention_point, mlp_point, row_digests

_NORMS = re.compile(r"model\.(?:layers\.(\d+)\.(input|post_attention)_layernorm|norm)")


class Trace:
    """A trace of a model's hidden states until `end`: digests of rows by point, in the order of arrival."""

    def __init__(self, model: torch.nn.Module):
        self.rows: dict[str, list[str]] = defaultdict(list)
        self._handles = []
        for name, module in model.named_modules():
            match = _NORMS.fullmatch(name)
            if match is None:
                continue
            layer, norm = match.groups()
            if layer is None:
                point = OUTPUT
            elif norm == "input":
                point = attention_point(int(layer))
            else:
                point = mlp_point(int(layer))
            self._handles.append(module.register_forward_hook(self._hook(point)))

    def _hook(self, point: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
            # With a residual a norm returns the sum as well; without one its input is the stream itself.
            stream = result[1] if isinstance(result, tuple) else inputs[0]
            if len(stream):
                self.rows[point] += row_digests(stream)

        return hook

    def end(self) -> dict[str, list[str]]:
        """Removes the hooks and returns the digests."""
        for handle in self._handles:
            handle.remove()
        return dict(self.rows)


def begin(runner: Any) -> dict[str, Any]:
    """Starts a trace of the model (verb "begin_trace")."""
    runner.slimx_trace = Trace(runner.model)
    return {}


def end(runner: Any) -> dict[str, list[str]]:
    """Ends the trace (verb "end_trace") and returns digests of rows by point."""
    trace = runner.__dict__.pop("slimx_trace", None)
    if trace is None:
        raise SlimxError("no trace was begun in this process")
    return trace.end()
