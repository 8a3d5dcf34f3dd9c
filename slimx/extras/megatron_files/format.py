"""Megatron-LM's checkpoints as a form of initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx.extras.megatron_files.directory import check_fit, is_megatron
from slimx.models.families import ModelSpec


class MegatronFormat:
    """A `slimx.models.files.formats.CheckpointFormat`."""

    name = "Megatron-LM"

    def recognises(self, directory: Path) -> bool:
        return is_megatron(directory)

    def check(self, directory: Path, spec: ModelSpec) -> None:
        check_fit(directory, spec.table, prediction=spec.prediction_layers)

    def load(self, directory: Path, spec: ModelSpec, chunks: list[Any]) -> None:
        from slimx.extras.megatron_files.load import load_weights  # imports megatron-core

        load_weights(check_fit(directory, spec.table, prediction=spec.prediction_layers), chunks)
