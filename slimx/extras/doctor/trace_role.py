"""Digests of the residual stream in a trainer's pass, for the comparison with an engine (`slimx doctor --gap --layers`;
role "trace")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slimx.data.batch import MicroBatch
from slimx.extras.doctor.row_digests import OUTPUT, attention_point, mlp_point, row_digests
from slimx.trainer.model.build import unwrap
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank


class TraceRole:
    """Traces of one rank's model; see `slimx.trainer.rank.Role`."""

    def __init__(self, rank: TrainerRank):
        self.model = rank.roles["model"]

    def reload(self, *, training: bool = True) -> None:
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Nothing of a trace is on the device."""

    @operation(needs="weights")
    def scores(self, batches: list[MicroBatch]) -> dict[str, list[str]]:
        """Return digests of the residual stream in this rank's layers in a pass over `batches`, by point."""
        with traced([unwrap(chunk) for chunk in self.model.chunks]) as rows:
            self.model.pipeline.scores([self.model.context.take(batch) for batch in batches])
        return dict(rows)


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
