"""What conversions refuse of their input: by name, before anything is written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from slimx.convert import run
from slimx.errors import SlimxError
from tests.unit.convert_stand import LAYOUT, go


def spoil(source: Path, how: str) -> None:
    files = sorted(source.glob("*.safetensors"))
    index = source / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    if how == "missing shard":
        files[1].unlink()
    elif how == "truncated":
        with files[1].open("r+b") as file:
            file.truncate(files[1].stat().st_size - 100)
    else:
        tensors = load_file(files[0])
        name = next(iter(tensors))
        if how == "unknown tensor":
            tensors["model.extra"] = torch.zeros(3)
            where["model.extra"] = files[0].name
        elif how == "wrong shape":
            tensors[name] = tensors[name][1:].clone()
        else:
            del tensors[name], where[name]
        save_file(tensors, files[0], metadata={"format": "pt"})
        index.write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("missing shard", "model-00001.safetensors named in model.safetensors.index.json is missing"),
        ("truncated", "model-00001.safetensors: truncated"),
        ("unknown tensor", "tensor model.extra has no place in the model"),
        ("wrong shape", r"tensor model.embed_tokens.weight has shape \[119, 48\], its config.json wants \[120, 48\]"),
        ("missing tensor", "tensor model.embed_tokens.weight is missing"),
    ],
)
def test_a_damaged_source_is_one_sentence_and_nothing_is_written(qwen, tmp_path, how, sentence):
    source = shutil.copytree(qwen, tmp_path / "source")
    spoil(source, how)
    for make in (run.hf_to_megatron, run.hf_to_fp8):
        with pytest.raises(SlimxError, match=sentence):
            go(make(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("how", "sentence"), [("missing", r"__0_0\.distcp: is missing"), ("truncated", r"__0_0\.distcp: is truncated")]
)
def test_a_damaged_megatron_directory_is_one_sentence(qwen, tmp_path, how, sentence):
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    file = megatron / "release/__0_0.distcp"
    if how == "missing":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 10)
    with pytest.raises(SlimxError, match=sentence):
        run.megatron_to_hf(megatron, qwen)


def test_a_damaged_piece_is_named(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    with (megatron / "release/__0_0.distcp").open("r+b") as file:
        file.write(bytes(200))
    with pytest.raises(SlimxError, match=r"__0_0\.distcp: damaged at byte 0"):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_tensor_that_is_not_whole_is_named(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen, layout=LAYOUT), tmp_path / "megatron")
    metadata = FileSystemReader(megatron / "release").read_metadata()
    del metadata.state_dict_metadata["decoder.layers.mlp.router.weight"].chunks[2]
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SlimxError, match=r"decoder\.layers\.mlp\.router\.weight is not whole"):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")


def test_a_target_that_exists_is_left_alone(qwen, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(SlimxError, match="is there already"):
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_too_small_a_disk_is_found_before_anything_is_written(qwen, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    small = os.statvfs_result([*real[:4], 100_000_000 // real.f_frsize, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    go(run.hf_to_megatron(qwen), tmp_path / "fits")
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:4], 10, *real[5:]]))
    with pytest.raises(SlimxError, match=r"has 0\.00 GB free, 0\.07 GB are needed"):
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fits"]
