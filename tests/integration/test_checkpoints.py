"""Checkpoints of real trainers on two gloo ranks, one start for all layouts, and plain torch on the other side."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slimx.extras.megatron_files.directory import check_fit
from slimx.models.families import read_model
from slimx.runtime.ports import free_port
from slimx.trainer.checkpoint import files
from tests.integration.chosen import chosen_cases
from tests.integration.megatron_stand import megatron_tensors, write_megatron
from tests.integration.rank_processes import run_ranks
from tests.integration.saved_tensors import saved_tensors, written_by_0_16
from tests.refusals import refused

pytestmark = pytest.mark.integration
LAYOUTS = {
    "DP2": {"world_size": 2},
    "EP2-bf16": {"world_size": 2, "expert": 2},
    "TP2": {"world_size": 2, "tensor": 2},
    "PP2xVPP2": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
    "CP2": {"world_size": 2, "context": 2},
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow("CP2 saves as DP2 does")] if name == "CP2" else []) for name in LAYOUTS
]
OTHERS = NAMES[2:]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers, so that virtual stages have something to hold."""
    directory = tmp_path_factory.mktemp("model") / "four"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).to(torch.float32).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


class Ranks:
    """What the two ranks said and left."""

    def __init__(self, out: Path, witness: Path):
        self.out, self.witness = out, witness
        self.said = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]

    def __getitem__(self, layout: str) -> dict[str, Any]:
        """Of the last rank: it belongs to the last pipeline stage, which knows the loss."""
        return self.said[-1][layout]


@pytest.fixture(scope="module")
def ranks(
    model: Path, config: dict[str, Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """With CP2 if the chosen tests are about it."""
    cut = any(each.get("layout") == "CP2" for each in chosen_cases(request))
    layouts = {name: layout for name, layout in LAYOUTS.items() if name != "CP2" or cut}
    out = tmp_path_factory.mktemp("checkpoints")
    weights, witness = load_file(model / "model.safetensors"), out / "witness"
    megatron = {
        kind: str(write_megatron(out / kind, megatron_tensors(weights, config, per_layer=per_layer), witness))
        for kind, per_layer in (("stacked", False), ("per_layer", True))
    }
    job = {"out": str(out), "model": str(model), "layouts": layouts, "megatron": megatron}
    job["ports"] = {name: free_port() for name in layouts}
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.checkpoint_rank", out, 2)
    return Ranks(out, witness)


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["DP2", "EP2-bf16"])
def test_training_during_a_save_does_not_change_the_checkpoint(ranks, layout):
    for said in ranks.said:
        saved = said[layout]["saved"]
        assert saved["early"] == [0, 1], "both ranks had trained two steps before either had written its part"
        assert saved["restored"] == saved["while_writing"]
    assert ranks[layout]["saved"]["restored"][0] != ranks[layout]["saved"]["restored"][1]


def test_the_second_checkpoint_reuses_the_plan_with_new_values(ranks):
    for said in ranks.said:
        again = said["DP2"]["saved_again"]
        assert again["restored"] == again["expected"]
        assert again["kept"]
    assert (ranks.out / "second" / "__0_0.distcp").read_bytes() != (ranks.out / "DP2" / "__0_0.distcp").read_bytes()


def test_replicas_are_written_by_all_data_parallel_ranks_in_equal_shares(ranks):
    sizes = [(ranks.out / "DP2" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


def test_a_rank_that_cannot_write_is_named_and_nothing_is_complete(ranks):
    for said in ranks.said:
        code, about, sentence = said["DP2"]["saved_badly"]
        assert (code, about) == ("checkpoint.write", str(ranks.out / "bad"))
        assert "trainer rank 1" in sentence and "IsADirectoryError" in sentence
    assert not (ranks.out / "bad" / "metadata.json").exists()


def test_a_checkpoint_has_the_layout_of_megatron_core_0_16(ranks):
    assert saved_tensors(ranks.out / "DP2") == written_by_0_16("Qwen3-MoE")


@pytest.mark.parametrize("layout", NAMES)
def test_a_trainer_that_takes_a_mirrored_state_goes_on_to_the_last_bit(ranks, layout):
    for said in ranks.said:
        assert said[layout]["mirrored"]["restored"] == said[layout]["mirrored"]["expected"]
    first, second = ranks[layout]["mirrored"]["restored"]
    assert first["loss/sft"] != second["loss/sft"]


# Other layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", OTHERS)
def test_another_layout_goes_on_with_the_same_losses(ranks, layout):
    """The first loss shows the weights, the second one the optimizer's state too."""
    found, expected = ranks[layout]["resumed"], ranks["DP2"]["saved"]["restored"]
    for step in range(2):
        assert found[step]["loss/sft"] == pytest.approx(expected[step]["loss/sft"], abs=1e-5)
        assert found[step]["optim/grad_norm"] == pytest.approx(expected[step]["optim/grad_norm"], rel=1e-4)


def test_weights_alone_go_where_the_optimizer_cannot(ranks):
    for said in ranks.said:
        assert said["EP2-bf16"]["refused"][:2] == ["checkpoint.load", str(ranks.out / "DP2")]
    found, expected = ranks["EP2-bf16"]["weights_only"], ranks["DP2"]["saved"]["restored"]
    assert found[0]["loss/sft"] == pytest.approx(expected[0]["loss/sft"], abs=0.02)  # bf16 against fp32
    assert found[0]["loss/sft"] < ranks["EP2-bf16"]["steps"][0]["loss/sft"] - 0.05, "the weights are the trained ones"


# Megatron-LM's directories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stacked", "per_layer"])
@pytest.mark.parametrize("layout", NAMES)
def test_megatrons_weights_equal_the_hugging_face_directory_bit_for_bit(ranks, layout, kind):
    assert [said[layout][kind] for said in ranks.said] == [True, True]


def test_no_code_of_a_checkpoint_runs(ranks):
    assert not ranks.witness.exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(ranks.out / "stacked" / "release" / "common.pt", weights_only=True)


def test_plain_torch_reads_a_checkpoint_under_megatrons_names(ranks, config, model):
    """After the first step the weights are near those that the run began with, and every name is there."""
    began = megatron_tensors(load_file(model / "model.safetensors"), config, per_layer=False)
    described = FileSystemReader(ranks.out / "DP2").read_metadata().state_dict_metadata
    rows = config["vocab_size"]
    trained = {}
    for key, tensor in began.items():
        shape = (rows, *tensor.shape[1:]) if key.startswith(("embedding", "output_layer")) else tensor.shape
        assert described[key].size == torch.Size(shape), key
        trained[key] = torch.empty(shape)
    dcp.load(trained, checkpoint_id=ranks.out / "DP2", no_dist=True)
    for key, tensor in trained.items():
        moved = (tensor - began[key][: len(tensor)]).abs().max().item()
        assert 0 < moved <= 1.2 * 2 * 2e-3, f"{key}: two Adam steps of 2e-3 move no weight further"
    moments = {key for key in described if key.startswith("optimizer.state.exp_avg.")}
    assert moments == {f"optimizer.state.exp_avg.{key}" for key in began}


def test_megatron_reads_iteration_and_arguments_from_what_slimx_writes(ranks):
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(ranks.out / "DP2" / "common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (2, 3.0)
    arguments = common["args"]
    assert (arguments.num_layers, arguments.hidden_size, arguments.tensor_model_parallel_size) == (4, 128, 1)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


# Damage ---------------------------------------------------------------------------------------------------------------


def test_an_edited_file_is_named_before_anything_is_loaded(ranks, tmp_path):
    shutil.copytree(ranks.out / "DP2", tmp_path / "edited")
    reports = [files.read_report(tmp_path / "edited", rank) for rank in range(2)]
    records = reports[0].files | reports[1].files
    assert {".metadata", "common.pt", "metadata.json", "__0_0.distcp", "__1_0.distcp"} == set(records)
    files.check_sizes(tmp_path / "edited", records)
    files.check_digests(tmp_path / "edited", records)
    with (tmp_path / "edited" / "__1_0.distcp").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    files.check_sizes(tmp_path / "edited", records)
    with refused("checkpoint.damaged", about=str(tmp_path / "edited" / "__1_0.distcp")):
        files.check_digests(tmp_path / "edited", records)


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(ranks, model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("megatron.shape") as error:
        check_fit(ranks.out / "stacked", read_model(tmp_path).table)
    assert error.value.about.startswith("decoder.layers.")
