"""Digests of the residual stream in a trainer's forward pass, to compare with an engine's (`slimx doctor --gap
--layers`; role "trace" of `slimx.roles`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from slimx.data.batch import MicroBatch
from slimx.extras.doctor.row_digests import OUTPUT, attention_point, mlp_point, row_digests
from slimx.trainer.model.build import unwrap
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank
from slimx.trainer.trainer import PolicyTrainer


class TraceRole:
    """Role of a trainer rank (`slimx.trainer.rank.Role`) that records digests of the hidden states of the rank's
    model."""

    def __init__(self, rank: TrainerRank):
        self.model = cast(PolicyTrainer, rank.roles["model"])

    def reload(self, *, training: bool = True) -> None:
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Does nothing, because the digests are not on the GPU."""

    @operation(needs="weights")
    def scores(self, batches: list[MicroBatch]) -> dict[str, list[str]]:
        """Runs a forward pass over `batches` and returns the token digests for each point of the residual stream in
        this rank's layers."""
        with traced([unwrap(chunk) for chunk in self.model.chunks]) as rows:
            self.model.pipeline.scores([self.model.context.take(batch) for batch in batches])
        return dict(rows)


@contextmanager
def traced(modules: list[Any]) -> Iterator[dict[str, list[str]]]:
    """Yields a dict that collects, while the block runs, the digests of the residual stream in `modules`, the GPT
    models of this rank, by point of the stream."""
    rows: dict[str, list[str]] = defaultdict(list)
    handles = []

    def note(norm: torch.nn.Module, point: str) -> None:
        handles.append(norm.register_forward_pre_hook(lambda _, inputs: rows[point].extend(row_digests(inputs[0]))))

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
