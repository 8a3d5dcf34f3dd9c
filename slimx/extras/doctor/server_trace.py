"""Digests of the residual stream in an engine's server, to compare with a trainer's (`slimx doctor --gap --layers`).

Written for SGLang 0.5.23 and Llama-like decoders, in which the norms of a layer are `input_layernorm` and
`post_attention_layernorm` and receive the residual in addition to the layer's output."""

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
    """Recorder of digests of a model's hidden states, active until `end` is called: one digest per token, in the order
    in which tokens are computed, for each point of the residual stream."""

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
            # With a residual, a norm also returns the sum; without one, its input is the residual stream itself.
            stream = result[1] if isinstance(result, tuple) else inputs[0]
            if len(stream):
                self.rows[point] += row_digests(stream)

        return hook

    def end(self) -> dict[str, list[str]]:
        """Stops the recording and returns the token digests for each point of the residual stream."""
        for handle in self._handles:
            handle.remove()
        return dict(self.rows)


def begin(runner: Any) -> dict[str, Any]:
    """Starts recording the hidden states of the model in `runner`, SGLang's model runner (server verb
    "begin_trace")."""
    runner.slimx_trace = Trace(runner.model)
    return {}


def end(runner: Any) -> dict[str, list[str]]:
    """Stops the recording (server verb "end_trace") and returns the token digests for each point of the residual
    stream."""
    trace = runner.__dict__.pop("slimx_trace", None)
    if trace is None:
        raise SlimxError("no trace was started in this process; call begin_trace first")
    return trace.end()
