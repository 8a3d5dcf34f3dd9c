"""Support for Megatron-LM's checkpoints as a format of initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimx.extras.megatron_files.directory import check_fit, is_megatron
from slimx.models.families import ModelSpec

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


class MegatronFormat:
    """Implementation of `slimx.models.files.formats.CheckpointFormat` that reads Megatron-LM's checkpoints."""

    name = "Megatron-LM"

    def recognizes(self, directory: Path) -> bool:
        return is_megatron(directory)

    def check(self, directory: Path, spec: ModelSpec) -> None:
        check_fit(directory, spec.table, prediction=spec.prediction_layers)

    def load(self, directory: Path, spec: ModelSpec, chunks: list[DistributedDataParallel]) -> None:
        from slimx.extras.megatron_files.load import load_weights  # imports megatron-core

        load_weights(check_fit(directory, spec.table, prediction=spec.prediction_layers), chunks)
