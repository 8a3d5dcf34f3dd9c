"""Input that conversions refuse: by name, before anything is written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from slimx.errors import SlimxError
from slimx.extras.convert import run
from slimx.extras.megatron_files.directory import check_fit
from slimx.models.families import read_model
from slimx.models.files.index import INDEX
from slimx.models.files.reader import CheckpointReader
from tests.checkpoint_stand import QWEN3_MOE, same, tensors_of, write_checkpoint
from tests.extras.convert.convert_stand import LAYOUT, QWEN3, fields, go
from tests.integration.megatron_stand import megatron_tensors, write_megatron
from tests.refusals import refused


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
    ("how", "code", "about"),
    [
        ("missing shard", "checkpoint.shard", "model-00001.safetensors"),
        ("truncated", "checkpoint.file", "model-00001.safetensors"),
        ("unknown tensor", "checkpoint.unknown", "model.extra"),
        ("wrong shape", "checkpoint.shape", "model.embed_tokens.weight"),
        ("missing tensor", "checkpoint.missing", "model.embed_tokens.weight"),
    ],
)
def test_a_damaged_source_is_one_sentence_and_nothing_is_written(qwen, tmp_path, how, code, about):
    source = shutil.copytree(qwen, tmp_path / "source")
    spoil(source, how)
    for make in (run.hf_to_megatron, run.hf_to_fp8):
        with refused(code, about=about):
            go(make(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("target", ["../blobs/lost", "tokenizer.json"], ids=["nowhere", "itself"])
def test_a_dangling_link_is_refused_before_anything_is_written(qwen, tmp_path, target):
    """As in a cache of the Hugging Face Hub that lost a file: the output would be without a tokenizer."""
    source, megatron = shutil.copytree(qwen, tmp_path / "source"), go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    (source / "tokenizer.json").symlink_to(target)
    with refused("convert.link", about=str(source / "tokenizer.json")):
        go(run.megatron_to_hf(megatron, source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "source"]


def test_a_directory_in_the_place_of_config_json_is_no_model_to_suggest(qwen, tmp_path):
    source = shutil.copytree(qwen, tmp_path / "source")
    (source / "config.json").unlink()
    (source / "config.json").mkdir()
    with refused("model.directory") as refusal:
        run.hf_to_megatron(source)
    assert str(refusal.value).count(str(source)) == 1


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_damaged_megatron_directory_is_one_sentence(qwen, tmp_path, how):
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    file = megatron / "release/__0_0.distcp"
    if how == "missing":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 10)
    with refused("megatron.file", about="__0_0.distcp"):
        run.megatron_to_hf(megatron, qwen)


def test_a_damaged_piece_is_named(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    with (megatron / "release/__0_0.distcp").open("r+b") as file:
        file.write(bytes(200))
    with refused("megatron.file", about="__0_0.distcp"):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_tensor_that_is_not_whole_is_named(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen, layout=LAYOUT), tmp_path / "megatron")
    metadata = FileSystemReader(megatron / "release").read_metadata()
    del metadata.state_dict_metadata["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"].chunks[2]
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with refused("megatron.incomplete", about="decoder.layers.2.mlp.experts.experts.linear_fc2.weight"):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")


def test_a_target_that_exists_is_left_alone(qwen, tmp_path):
    (tmp_path / "out").mkdir()
    with refused("convert.exists", about=str(tmp_path / "out")):
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_too_small_a_disk_is_found_before_anything_is_written(qwen, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    small = os.statvfs_result([*real[:4], 100_000_000 // real.f_frsize, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    go(run.hf_to_megatron(qwen), tmp_path / "fits")
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:4], 10, *real[5:]]))
    with refused("convert.space", about=str(tmp_path / "out.partial")):
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fits"]


# Weights that are no finite numbers -----------------------------------------------------------------------------------

BROKEN = "model.layers.2.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_its_tensor(qwen, tmp_path, value):
    source, weights = shutil.copytree(qwen, tmp_path / "source"), tensors_of(qwen)
    weights[BROKEN][1, 2] = value
    for file in source.glob("*.safetensors"):
        save_file({name: weights[name] for name in load_file(file)}, file, metadata={"format": "pt"})
    with refused("checkpoint.finite", about=BROKEN):
        go(run.hf_to_megatron(source), tmp_path / "out")
    megatron = write_megatron(
        tmp_path / "m", megatron_tensors(weights, QWEN3_MOE, per_layer=True), tmp_path / "witness"
    )
    with refused("checkpoint.finite", about=BROKEN):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_padding_of_a_megatron_checkpoint_may_hold_anything(qwen, tmp_path):
    made = megatron_tensors(tensors_of(qwen), QWEN3_MOE, per_layer=True)
    made["output_layer.weight"][QWEN3_MOE["vocab_size"] :] = float("nan")
    megatron = write_megatron(tmp_path / "m", made, tmp_path / "witness")
    made = tensors_of(go(run.megatron_to_hf(megatron, qwen), tmp_path / "out"))
    assert torch.equal(made["lm_head.weight"], tensors_of(qwen)["lm_head.weight"].float())


# An index that says something else ------------------------------------------------------------------------------------

FIRST = "model-00000.safetensors"
INDICES: dict[str, tuple[Any, str, str]] = {
    "not JSON": (b"{", "checkpoint.json", INDEX),
    "not UTF-8": (b'{"weight_map": {"\xff": "a"}}', "checkpoint.json", INDEX),
    "nested without end": (b"[" * 100_000, "checkpoint.json", INDEX),
    "a list": ([], "checkpoint.json", INDEX),
    "no weight_map": ({"metadata": {}}, "checkpoint.index", INDEX),
    "an empty weight_map": ({"weight_map": {}}, "checkpoint.index", INDEX),
    "a list as weight_map": ({"weight_map": ["a"]}, "checkpoint.index", INDEX),
    "numbers for files": ({"weight_map": {"model.norm.weight": 3}}, "checkpoint.index", INDEX),
    "a file elsewhere": ({"weight_map": {"model.norm.weight": "../x"}}, "checkpoint.index", "../x"),
    "a directory": ({"weight_map": {"model.norm.weight": ".."}}, "checkpoint.shard", ".."),
    "no file": ({"weight_map": {"model.norm.weight": ""}}, "checkpoint.shard", ""),
    "a missing file": ({"weight_map": {"model.norm.weight": "x.safetensors"}}, "checkpoint.shard", "x.safetensors"),
}


@pytest.mark.parametrize("how", INDICES)
def test_a_damaged_index_is_refused_by_name(qwen, tmp_path, how):
    source = shutil.copytree(qwen, tmp_path / "source")
    index, code, about = INDICES[how]
    (source / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    for read in (run.hf_to_megatron, run.hf_to_fp8, CheckpointReader):
        with pytest.raises(SlimxError) as error:
            read(source)
        assert error.value.code == code
        assert error.value.about.endswith(about)


def test_an_index_that_names_the_wrong_file_is_refused_with_the_tensor(qwen, tmp_path):
    source = shutil.copytree(qwen, tmp_path / "source")
    where = json.loads((source / INDEX).read_text())["weight_map"]
    assert where["model.norm.weight"] != FIRST
    (source / INDEX).write_text(json.dumps({"weight_map": where | {"model.norm.weight": FIRST}}))
    for read in (run.hf_to_megatron, lambda path: CheckpointReader(path).check(read_model(path).table)):
        with pytest.raises(SlimxError) as error:
            read(source)
        assert (error.value.code, error.value.about) == ("checkpoint.index", "model.norm.weight")


@pytest.mark.parametrize(
    "changed",
    [
        {"num_experts": 8.0},
        {"num_experts": -8},
        {"num_experts": "8"},
        {"num_hidden_layers": 4.0},
        {"num_hidden_layers": 10**12},
        {"num_experts": 10**12},
        {"hidden_size": 48.0},
        {"hidden_size": 0},
        {"vocab_size": 120.5},
        {"head_dim": [16]},
    ],
)
def test_a_size_in_config_json_that_is_none_is_refused(qwen, tmp_path, changed):
    source = fields(shutil.copytree(qwen, tmp_path / "source"), **changed)
    with pytest.raises(SlimxError) as error:
        run.hf_to_megatron(source)
    assert (error.value.code, error.value.about) == ("model.field", next(iter(changed)))
    assert str(source / "config.json") in str(error.value)


# A Megatron directory that holds more than the configuration knows ----------------------------------------------------

KNOWN = "decoder.layers.0.self_attention.linear_qkv.weight"
MORE = {
    "a layer": "decoder.layers.4.self_attention.linear_qkv.weight",
    "a layer of multi-token prediction": "mtp.layers.0.eh_proj.weight",
    "biases of query, key and value": "decoder.layers.0.self_attention.linear_qkv.bias",
    "a shared expert": "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
    "an expert bias": "decoder.layers.2.mlp.router.expert_bias",
    "an adapter": "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight",
    "positions": "embedding.position_embeddings.weight",
}


@pytest.fixture(scope="module")
def stood_in(qwen: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of another system's checkpoint of `qwen`, by plain torch."""
    made = megatron_tensors(tensors_of(qwen), QWEN3_MOE, per_layer=True)
    return {key: value.to(torch.bfloat16) for key, value in made.items()}


def check_refused(megatron: Path, config: Path, code: str, about: str) -> None:
    """Checks that a directory is refused by the conversion and by the check of trainers before they load."""
    for read in (
        lambda: run.megatron_to_hf(megatron, config),
        lambda: check_fit(megatron, (spec := read_model(config)).table, prediction=spec.prediction_layers),
    ):
        with refused(code, about=about):
            read()


@pytest.mark.parametrize("what", MORE)
def test_a_tensor_that_the_configuration_does_not_know_is_refused_by_name(qwen, stood_in, tmp_path, what):
    more = stood_in | {MORE[what]: torch.zeros(3)}
    check_refused(write_megatron(tmp_path / "m", more, tmp_path / "witness"), qwen, "megatron.unknown", MORE[what])


def test_norms_and_output_layers_unknown_to_the_config_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", QWEN3 | {"tie_word_embeddings": False})
    megatron = go(run.hf_to_megatron(source), tmp_path / "megatron")
    tied = fields(shutil.copytree(source, tmp_path / "tied"), tie_word_embeddings=True)
    check_refused(megatron, tied, "megatron.unknown", "output_layer.weight")
    plain = fields(shutil.copytree(source, tmp_path / "plain"), architectures=["LlamaForCausalLM"])
    check_refused(megatron, plain, "megatron.unknown", "decoder.layers.self_attention.k_layernorm.weight")


def test_optimizer_state_and_extra_state_are_no_part_of_the_model(qwen, stood_in, tmp_path):
    beside = ("optimizer.state.exp_avg." + KNOWN, "chained_0.optimizer.state.exp_avg." + KNOWN, KNOWN + "._extra_state")
    more = stood_in | {key: torch.zeros(3) for key in beside}
    megatron = write_megatron(tmp_path / "m", more, tmp_path / "witness")
    assert check_fit(megatron, read_model(qwen).table).per_layer
    back = go(run.megatron_to_hf(megatron, qwen), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(qwen)) == []


def test_declared_layers_of_multi_token_prediction_may_be_left_untrained(deepseek, tmp_path):
    megatron = go(run.hf_to_megatron(deepseek), tmp_path / "m")
    spec = read_model(deepseek)
    assert (spec.table.mtp_layers, spec.prediction_layers) == (0, 1)
    assert check_fit(megatron, spec.table, prediction=spec.prediction_layers).per_layer
    with pytest.raises(SlimxError) as error:
        check_fit(megatron, spec.table)
    assert error.value.code == "megatron.unknown" and error.value.about.startswith("mtp.layers.0.")


@pytest.mark.parametrize("vocabulary", [119, 100, 64])
def test_rows_of_a_vocabulary_that_padding_does_not_explain_are_refused(qwen, stood_in, tmp_path, vocabulary):
    """slimx's directories say how many tokens there are; others' have what Megatron-LM's rule gives for a usual
    multiple, or less."""
    smaller = fields(shutil.copytree(qwen, tmp_path / "smaller"), vocab_size=vocabulary)
    converted = go(run.hf_to_megatron(qwen), tmp_path / "own")
    check_refused(converted, smaller, "megatron.shape", "embedding.word_embeddings.weight")
    cut = {key: value[:120] if value.shape[0] == 192 else value for key, value in stood_in.items()}
    megatron = write_megatron(tmp_path / "m", cut, tmp_path / "witness")
    if vocabulary == 119:  # the next multiple of eight
        assert check_fit(megatron, read_model(smaller).table).per_layer
    else:
        check_refused(megatron, smaller, "megatron.shape", "embedding.word_embeddings.weight")
