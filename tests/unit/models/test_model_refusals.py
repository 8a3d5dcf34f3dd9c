"""Directories, families and tables that no model can be made of are refused before a tensor is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slimx.models.families import load_family, read_model
from slimx.models.files.reader import CheckpointReader
from tests.checkpoint_stand import QWEN3_MOE
from tests.refusals import refused


def described(directory: Path, **changes: Any) -> Path:
    """Returns a directory of nothing but a config.json; None leaves a field out."""
    fields = {key: value for key, value in {**QWEN3_MOE, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_directory_without_a_configuration_is_no_model(tmp_path: Path):
    with refused("model.directory", about=str(tmp_path)):
        read_model(tmp_path)


def test_architectures_that_are_no_list_are_refused(tmp_path: Path):
    with refused("model.architectures", about=str(tmp_path / "config.json")):
        read_model(described(tmp_path, architectures="Qwen3MoeForCausalLM"))


def test_a_field_that_is_missing_is_named(tmp_path: Path):
    with refused("model.field_missing", about="moe_intermediate_size"):
        read_model(described(tmp_path, moe_intermediate_size=None))


@pytest.mark.parametrize("layers", [-1, "2"])
def test_a_number_of_prediction_layers_that_is_none_is_refused_by_its_key(tmp_path: Path, layers: Any):
    with refused("model.mtp_layers", about="trainer.megatron.mtp_num_layers"):
        read_model(described(tmp_path), mtp_layers=layers)


def test_a_family_without_a_required_part_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "half_a_family", raising=False)
    (tmp_path / "half_a_family.py").write_text('ARCHITECTURE = "A"\ndef unsupported(hf): ...\n')
    with refused("model.family_part", about="transformer_config"):
        load_family("half_a_family")


def test_a_directory_without_weights_is_refused(tmp_path: Path):
    with refused("checkpoint.none", about=str(tmp_path)):
        CheckpointReader(described(tmp_path))
