"""Checkpoints of real trainers on two gloo ranks, one start for all layouts, and plain torch on the other side."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from slimx.config.schema import Config
from slimx.extras.megatron_files.directory import check_fit
from slimx.models.families import read_model
from slimx.runtime.ports import free_port
from slimx.trainer.checkpoint import files
from tests.integration.chosen import chosen_cases
from tests.integration.megatron_stand import megatron_tensors, write_megatron
from tests.integration.rank_processes import run_ranks
from tests.integration.saved_tensors import saved_tensors, written_by_0_16
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import Rank, equal
from tests.refusals import refusal_fields, refused

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
LOCKED_S = 300.0
"""Seconds after which the thread of a save that is not released writes all the same."""


class CheckpointRank(Rank):
    """A rank under layout `name` of the job."""

    def __init__(self, job: dict[str, Any], rank: int, name: str):
        self.name = name
        where = f"tcp://127.0.0.1:{job['ports'][name]}"
        super().__init__(job | {"layout": job["layouts"][name], "init_method": where}, rank)

    def config(self, load: str | None = None) -> Config:
        dtype = "bfloat16" if "bf16" in self.name else "float32"
        return super().config(dtype=dtype, load=load)

    def keep(self, key: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Keeps the result of `work`, or the fields of the refusal that it raises."""
        try:
            value = work(*arguments, **options)
        except Exception as error:
            value = refusal_fields(error)
        self.results[key] = value

    def save_while_training(self, trainer: Any, path: Path) -> dict[str, Any]:
        """Takes two more steps while the thread has not written its copy; then goes back and takes them again."""
        saver, trained = trainer.saver, threading.Event()
        write, saver._write = saver._write, lambda *work: (trained.wait(LOCKED_S), write(*work))
        begin_save(trainer, path, step=2)
        saver._write = write
        while_writing = self.steps(trainer, (2, 3))
        early = files.unreported(path, range(self.sizes.world))
        self.barrier()  # both have looked
        trained.set()
        finish_save(trainer, path)
        trainer.restore(str(path), same_layout=True)
        return {"while_writing": while_writing, "early": early, "restored": self.steps(trainer, (2, 3))}

    def save_again(self, trainer: Any, path: Path) -> dict[str, Any]:
        """Saves other values by the plan of the first save."""
        plan, steps = trainer.saver._metadata, self.steps(trainer, (4,))
        self.save(trainer, path, step=5)
        expected = self.steps(trainer, (5,))
        trainer.restore(str(path), same_layout=True)
        kept = trainer.saver._metadata is plan
        return {"kept": kept, "before": steps, "expected": expected, "restored": self.steps(trainer, (5,))}

    def save_badly(self, trainer: Any, path: Path) -> None:
        """Saves where a directory stands in the place of a file of rank 1."""
        if self.rank == 0:
            (path / "__1_0.distcp").mkdir(parents=True)
        self.save(trainer, path, step=5)

    def resume(self, path: Path, *, load_optimizer: bool = True) -> list[dict[str, float]]:
        """Steps of a new trainer that was brought to the checkpoint of another layout."""
        trainer = self.trainer()
        trainer.restore(str(path), same_layout=False, load_optimizer=load_optimizer)
        return self.steps(trainer, (2, 3))

    def mirror(self, trainer: Any) -> dict[str, Any]:
        """Takes two steps of `trainer`, and of a new one that began from its bytes."""
        from slimx.extras.recovery.mirror import Mirror, read_back
        from slimx.trainer.checkpoint.load import take_state
        from slimx.trainer.checkpoint.state import local_state

        state = local_state(trainer.chunks, trainer.optimizer, loading=False, frozen=False)
        data = Mirror(self.rank, 60).copied(state)
        expected, new = self.steps(trainer, (6, 7)), self.trainer()
        empty = local_state(new.chunks, new.optimizer, loading=True, frozen=False)
        take_state(read_back(data, empty), new.chunks, new.optimizer)
        new.weights.changed()
        return {"expected": expected, "restored": self.steps(new, (6, 7))}

    def same_weights(self, path: str) -> bool:
        """Returns True if Megatron-LM's directory gives this rank the bits that the Hugging Face one gives it."""
        return equal(self.trainer(load=path).weights.parameters, self.trainer().weights.parameters)


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    """Trains under one layout after the other; returns the results by layout."""
    out, results = job["out"], {}
    for name in job["layouts"]:
        rank = CheckpointRank(job, number, name)
        trainer = rank.trainer()
        rank.keep("steps", rank.steps, trainer, (0, 1))
        if name in ("DP2", "EP2-bf16"):
            rank.keep("saved", rank.save_while_training, trainer, out / name)
        if name == "DP2":
            rank.keep("saved_again", rank.save_again, trainer, out / "second")
            rank.keep("saved_badly", rank.save_badly, trainer, out / "bad")
        elif name == "EP2-bf16":
            rank.keep("refused", rank.resume, out / "DP2")
            rank.keep("weights_only", rank.resume, out / "DP2", load_optimizer=False)
        else:
            rank.keep("resumed", rank.resume, out / "DP2")
        rank.keep("mirrored", rank.mirror, trainer)
        for kind, path in job["megatron"].items():
            rank.keep(kind, rank.same_weights, path)
        results[name] = rank.finish()
    return results


@pytest.fixture(scope="module")
def config(deep_model: Path) -> dict[str, Any]:
    return json.loads((deep_model / "config.json").read_text())


class Ranks:
    """Results of the two ranks, and what they left."""

    def __init__(self, out: Path, witness: Path, results: list[dict[str, Any]]):
        self.out, self.witness, self.results = out, witness, results

    def __getitem__(self, layout: str) -> dict[str, Any]:
        """Returns results of the last rank: it belongs to the last pipeline stage, which knows the loss."""
        return self.results[-1][layout]


@pytest.fixture(scope="module")
def ranks(
    deep_model: Path, config: dict[str, Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """Runs the ranks, with CP2 if the chosen tests are about it."""
    cut = any(case.get("layout") == "CP2" for case in chosen_cases(request))
    layouts = {name: layout for name, layout in LAYOUTS.items() if name != "CP2" or cut}
    out = tmp_path_factory.mktemp("checkpoints")
    weights, witness = load_file(deep_model / "model.safetensors"), out / "witness"
    megatron = {
        kind: write_megatron(out / kind, megatron_tensors(weights, config, per_layer=per_layer), witness)
        for kind, per_layer in (("stacked", False), ("per_layer", True))
    }
    job = {
        "model": deep_model,
        "layouts": layouts,
        "megatron": megatron,
        "ports": {name: free_port() for name in layouts},
    }
    return Ranks(out, witness, run_ranks(train, out, 2, job))


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["DP2", "EP2-bf16"])
def test_training_during_a_save_does_not_change_the_checkpoint(ranks, layout):
    for results in ranks.results:
        saved = results[layout]["saved"]
        assert saved["early"] == [0, 1], "both ranks had trained two steps before either had written its part"
        assert saved["restored"] == saved["while_writing"]
    assert ranks[layout]["saved"]["restored"][0] != ranks[layout]["saved"]["restored"][1]


def test_the_second_checkpoint_reuses_the_plan_with_new_values(ranks):
    for results in ranks.results:
        again = results["DP2"]["saved_again"]
        assert again["restored"] == again["expected"]
        assert again["kept"]
    assert (ranks.out / "second" / "__0_0.distcp").read_bytes() != (ranks.out / "DP2" / "__0_0.distcp").read_bytes()


def test_replicas_are_written_by_all_data_parallel_ranks_in_equal_shares(ranks):
    sizes = [(ranks.out / "DP2" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


def test_a_rank_that_cannot_write_is_named_and_nothing_is_complete(ranks):
    for results in ranks.results:
        code, about, sentence = results["DP2"]["saved_badly"]
        assert (code, about) == ("checkpoint.write", str(ranks.out / "bad"))
        assert "trainer rank 1" in sentence and "IsADirectoryError" in sentence
    assert not (ranks.out / "bad" / "metadata.json").exists()


def test_a_checkpoint_has_the_layout_of_megatron_core_0_16(ranks):
    assert saved_tensors(ranks.out / "DP2") == written_by_0_16("Qwen3-MoE")


@pytest.mark.parametrize("layout", NAMES)
def test_a_trainer_that_takes_a_mirrored_state_goes_on_to_the_last_bit(ranks, layout):
    for results in ranks.results:
        assert results[layout]["mirrored"]["restored"] == results[layout]["mirrored"]["expected"]
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
    for results in ranks.results:
        assert results["EP2-bf16"]["refused"][:2] == ["checkpoint.load", str(ranks.out / "DP2")]
    found, expected = ranks["EP2-bf16"]["weights_only"], ranks["DP2"]["saved"]["restored"]
    assert found[0]["loss/sft"] == pytest.approx(expected[0]["loss/sft"], abs=0.02)  # bf16 against fp32
    assert found[0]["loss/sft"] < ranks["EP2-bf16"]["steps"][0]["loss/sft"] - 0.05, "the weights are the trained ones"


# Megatron-LM's directories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stacked", "per_layer"])
@pytest.mark.parametrize("layout", NAMES)
def test_megatrons_weights_equal_the_hugging_face_directory_bit_for_bit(ranks, layout, kind):
    assert [results[layout][kind] for results in ranks.results] == [True, True]


def test_no_code_of_a_checkpoint_runs(ranks):
    assert not ranks.witness.exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(ranks.out / "stacked" / "release" / "common.pt", weights_only=True)


def test_plain_torch_reads_a_checkpoint_under_megatrons_names(ranks, config, deep_model):
    """After the first step the weights are near those that the run began with, and every name is there."""
    began = megatron_tensors(load_file(deep_model / "model.safetensors"), config, per_layer=False)
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


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(ranks, deep_model, tmp_path):
    config = json.loads((deep_model / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("megatron.shape") as error:
        check_fit(ranks.out / "stacked", read_model(tmp_path).table)
    assert error.value.about.startswith("decoder.layers.")
