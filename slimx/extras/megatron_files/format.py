"""Support for Megatron-LM's checkpoints as a format of initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimx.extras.megatron_files.bridge import bridge_table
from slimx.extras.megatron_files.directory import Fit, check_fit, is_megatron
from slimx.models.families import ModelSpec

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


class MegatronFormat:
    """Implementation of `slimx.models.files.formats.CheckpointFormat` that reads Megatron-LM's checkpoints."""

    name = "Megatron-LM"

    def recognizes(self, directory: Path) -> bool:
        return is_megatron(directory)

    def check(self, directory: Path, spec: ModelSpec) -> None:
        _fit(directory, spec)

    def load(self, directory: Path, spec: ModelSpec, chunks: list[DistributedDataParallel]) -> None:
        from slimx.extras.megatron_files.load import load_weights  # imports megatron-core

        load_weights(_fit(directory, spec), spec.table, chunks)


def _fit(directory: Path, spec: ModelSpec) -> Fit:
    return check_fit(directory, spec.table, bridge=bridge_table(spec), prediction=spec.prediction_layers)
