"""A number format that slimx does not bring is an object: the reader of checkpoints takes its tensors and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from slimx.layout.maps import Rect
from slimx.layout.number_formats import NumberFormat, StoredTensors, published_format
from slimx.layout.table import Stored
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from tests.checkpoint_stand import QWEN3_MOE
from tests.refusals import refused

NAME = "model.layers.0.self_attn.q_proj.weight"


class Quarters(NumberFormat):
    """Quarters in bytes, under another name."""

    def holds(self, files: Any, name: str) -> bool:
        return f"{name}_quarters" in files.names

    def tensors(self, files: Any, name: str, shape: tuple[int, ...], *, transposed: bool) -> StoredTensors:
        return {f"{name}_quarters": (shape, ("U8",))}

    def read(self, files: Any, place: Stored, rows: slice, cols: slice) -> torch.Tensor:
        return files.view(f"{place.name}_quarters")[rows, cols].bfloat16() / 4


class Converted(Quarters):
    CONVERTED: ClassVar[bool] = True


def stored(directory: Path, codes: torch.Tensor | None = None) -> tuple[Path, Any, torch.Tensor]:
    """Writes a checkpoint with one matrix in quarters, its weight table, and the codes."""
    (directory / "config.json").write_text(json.dumps(QWEN3_MOE))
    table = read_model(directory).table
    tensors = {name: torch.zeros(shape) for name, shape in table.checkpoint_shapes().items()}
    shape = tensors.pop(NAME).shape
    codes = torch.arange(shape.numel()).remainder(251).byte().view(shape) if codes is None else codes
    save_file(tensors | {f"{NAME}_quarters": codes}, directory / "model.safetensors")
    return directory, table, codes


def test_its_tensors_are_expected_and_its_values_read(tmp_path: Path) -> None:
    directory, table, codes = stored(tmp_path)
    reader = CheckpointReader(directory, formats={"quarters": Quarters()})
    reader.check(table)
    assert reader.dtype(NAME) == torch.bfloat16
    part = reader.read(NAME, Rect(0, 2, 3, 4, 5, 0, 0, step=2))
    assert torch.equal(part, codes[2:10:2, 3:8].bfloat16() / 4)
    with refused("checkpoint.missing", about=NAME):
        CheckpointReader(directory).check(table)


@pytest.mark.parametrize("damage", ["shape", "dtype"])
def test_a_damaged_tensor_of_it_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    codes = stored(tmp_path)[2]
    directory, table, _ = stored(tmp_path, codes[1:].contiguous() if damage == "shape" else codes.int())
    with refused(f"checkpoint.{damage}", about=f"{NAME}_quarters"):
        CheckpointReader(directory, formats={"quarters": Quarters()}).check(table)


def test_a_format_for_conversions_is_refused_where_a_model_is_trained(tmp_path: Path) -> None:
    directory, table, _ = stored(tmp_path)
    reader = CheckpointReader(directory, formats={"quarters": Converted()})
    reader.check(table, quantized=True)
    with refused("checkpoint.missing", about=NAME):
        reader.check(table)


@pytest.mark.parametrize("rule", ["ieee", "triton", "te", "ue8m0", "int4", None])
def test_each_rule_of_publications_has_the_codes_of_one_format(rule: str | None) -> None:
    found = published_format(rule).quantization(rule)
    assert (found and found.rule) == rule
