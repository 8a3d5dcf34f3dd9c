"""Results of a trainer do not depend on its layout: gloo ranks of six layouts against one rank and transformers.

Each layout is one start of real processes (5 to 12 s) that do all that the tests below assert.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.layout.ranks import coordinates
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights, perturbed
from tests.integration.layouts import ALL, LAYOUTS, SEVERAL, SIZES
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_oracle import Oracle, difference, write_model
from tests.integration.trainer_rank import Rank, by_sequence, demonstrations
from tests.refusals import refusal_fields

pytestmark = pytest.mark.integration

RESTORES = {"TP2": ["DP2"], "EP2": ["DP2"], "EP2xTP2": ["EP2"]}
"""Layout -> whose checkpoints it loads."""
STEPS = 10
OPTIMIZER = {
    "lr": 2e-3,
    "min_lr": 2e-4,
    "decay": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
}
"""Optimizer of the ten steps and the two after them."""


class LayoutRank(Rank):
    optimizer = OPTIMIZER

    def first_step(self) -> None:
        """Writes log-probs and gradients of one SFT step; without the distributed optimizer they are whole."""
        trainer = self.trainer(distributed_optimizer=False, optimizer={"clip_grad": 0.0})
        batches = self.demonstrated(0)
        self.keep_logprobs(batches, trainer.logprobs(batches))
        self.results["first_step"] = trainer.train_step(batches, step=0, version=0)
        self.write_tensors("sft_gradients", self.gradients(trainer))

    def train(self) -> Any:
        """Takes ten steps with the distributed optimizer; the last two are the updates of one step of the loop."""
        trainer = self.trainer()
        *single, before, last = (self.demonstrated(s) for s in range(STEPS))
        self.results["steps"] = [trainer.train_step(batches, step=s, version=0) for s, batches in enumerate(single)]
        self.results["steps"].append(trainer.train_updates([before, last], step=(STEPS - 2) // 2, version=0))
        self.write_tensors("weights", trainer.weights.parameters)
        return trainer

    def next_steps(self, trainer: Any) -> list[dict[str, float]]:
        """Takes the eleventh and twelfth: the second shows the optimizer's state. With a number of the random state."""
        import torch

        draw = {"random": float(torch.rand(()))}
        return [metrics | draw for metrics in self.steps(trainer, (STEPS, STEPS + 1))]

    def save_and_restore(self, trainer: Any) -> None:
        """Saves, goes on, comes back, goes on again."""
        path = self.out / "checkpoint"
        begin_save(trainer, path, step=STEPS)
        self.results["after_save"] = self.next_steps(trainer)  # while the files are written
        finish_save(trainer, path)
        trainer.restore(str(path), same_layout=True)
        self.results["after_restore"] = self.next_steps(trainer)

    def restore_from_other_layouts(self, trainer: Any) -> None:
        for path in self.job["restore"]:
            name = f"after_restore_of_{Path(path).parent.name}"
            try:
                trainer.restore(path, same_layout=False)
            except BaseException as error:
                self.results[name] = refusal_fields(error)
            else:
                self.results[name] = self.next_steps(trainer)

    def restore_damaged(self, trainer: Any) -> None:
        """Restores a checkpoint of which one file lost its second half."""
        path = self.out / "damaged"
        if self.rank == 0:
            shutil.copytree(self.out / "checkpoint", path)
            files = sorted(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
            os.truncate(files[-1], files[-1].stat().st_size // 2)
        self.barrier()
        try:
            trainer.restore(str(path), same_layout=True)
        except BaseException as error:  # whatever it is, the other tests of this layout need the rest
            self.results["damaged"] = refusal_fields(error)

    def finish(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        self.results["place"] = {
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "data": parallel_state.get_data_parallel_rank(),
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
            "expert": parallel_state.get_expert_model_parallel_rank(),
            "expert_data": parallel_state.get_expert_data_parallel_rank(),
            "context": parallel_state.get_context_parallel_rank(),
        }
        return super().finish()


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    rank = LayoutRank(job, number)
    rank.first_step()
    trainer = rank.train()
    rank.save_and_restore(trainer)
    rank.restore_from_other_layouts(trainer)
    rank.restore_damaged(trainer)
    return rank.finish()


class Layout:
    """Files and results of the ranks of one layout."""

    def __init__(self, name: str, directory: Path, results: list[dict[str, Any]]):
        self.directory, self.sizes, self.ranks = directory, SIZES[name], results

    def tensors(self, name: str) -> Weights:
        return load_file(self.directory / f"{name}.safetensors")

    @property
    def last(self) -> dict[str, Any]:
        """Results of the last rank: it belongs to the last pipeline stage, which knows the loss."""
        return self.ranks[-1]

    def logprobs(self) -> dict[tuple[int, ...], np.ndarray]:
        """Returns log-probs by sequence (its tokens with the last label)."""
        ranks = [by_sequence(np.load(self.directory / f"{rank}.npz")) for rank in range(self.sizes.world)]
        return {sequence: values for results in ranks for sequence, values in results.items()}


class Laboratory:
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, model: Path, restored: set[str]):
        """`restored`: layouts whose checkpoints the chosen tests restore in others."""
        self.directory, self.model, self.restored = directory, model, restored
        self.layout = cached(self._run)

    def __getitem__(self, name: str) -> Layout:
        return self.layout(name)

    def _run(self, name: str) -> Layout:
        others = [other for other in RESTORES.get(name, []) if other in self.restored]
        restore = [self[other].directory / "checkpoint" for other in others]
        job = {"model": self.model, "layout": LAYOUTS[name], "restore": restore}
        out = self.directory / name
        return Layout(name, out, run_ranks(train, out, SIZES[name].world, job))


@pytest.fixture(scope="module")
def model(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model whose attention and routing are far from uniform."""
    return write_model(tmp_path_factory.mktemp("models") / "model", tiny_model, perturbed(tiny_weights, 1, 0.05))


@pytest.fixture(scope="module")
def laboratory(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    restored = {case["other"] for case in chosen_cases(request) if "other" in case}
    return Laboratory(tmp_path_factory.mktemp("layouts"), model, restored)


# One rank against transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_logprobs_are_those_of_transformers(laboratory, model, name):
    found = laboratory[name].logprobs()
    sequences = [trajectory.token_ids for trajectory in demonstrations(0)]
    assert found.keys() == {tuple(tokens.tolist()) for tokens in sequences}
    with torch.no_grad():
        logprobs = Oracle(model).logprobs(sequences)
    for tokens, expected in zip(sequences, logprobs, strict=True):
        assert np.abs(found[tuple(tokens.tolist())] - expected.numpy()).max() <= 1e-5


def test_loss_and_gradients_of_one_rank_are_those_of_transformers(laboratory, model):
    oracle = Oracle(model)
    loss = oracle.sft_loss(demonstrations(0))
    loss.backward()
    single = laboratory["single"]
    assert single.last["first_step"]["loss/sft"] == pytest.approx(loss.item(), abs=1e-5)
    worst, name = difference(single.tensors("sft_gradients"), oracle.gradients())
    assert worst <= 1e-5, name
    norm = sum(gradient.double().square().sum() for gradient in oracle.gradients().values()) ** 0.5
    assert single.last["first_step"]["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_supervised_steps_of_one_rank_equal_transformers_with_adamw(laboratory, model):
    oracle = Oracle(model)
    parameters = list(oracle.model.parameters())
    # Vectors (norms) are not decayed.
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == many] for many in (True, False))
    options = {"betas": OPTIMIZER["betas"], "eps": OPTIMIZER["eps"]}
    decayed = {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}
    adam = torch.optim.AdamW([decayed, {"params": vectors, "weight_decay": 0.0}], **options)
    losses, norms = [], []
    for step in range(STEPS):
        # Two steps of warm-up, then linearly from 2e-3 at step 2 to 2e-4 at step 11.
        for group in adam.param_groups:
            group["lr"] = [1e-3, 2e-3][step] if step < 2 else 2e-3 - 1.8e-3 * (step - 2) / 9
        adam.zero_grad()
        loss = oracle.sft_loss(demonstrations(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_grad"]).item())
        losses.append(loss.item())
        adam.step()
    assert min(norms) > OPTIMIZER["clip_grad"] and losses[-1] < losses[0] - 0.2, "the steps must clip and learn"
    found = laboratory["single"].last["steps"]
    # The last two were one step of two updates, whose metrics are means.
    losses[-2:], norms[-2:] = [np.mean(losses[-2:])], [np.mean(norms[-2:])]
    assert [step["loss/sft"] for step in found] == pytest.approx(losses, abs=1e-4)
    assert [step["optim/grad_norm"] for step in found] == pytest.approx(norms, rel=1e-3)
    assert found[-1]["optim/lr"] == pytest.approx(2e-3 - 1.8e-3 * 7 / 9)
    worst, name = difference(laboratory["single"].tensors("weights"), oracle.named(lambda p: p.detach()))
    assert worst <= 1e-3, name


# Layouts against one rank ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_ranks_stand_where_megatron_put_them(laboratory, name):
    layout = laboratory[name]
    places = [asdict(coordinates(rank, layout.sizes)) for rank in range(layout.sizes.world)]
    assert [results["place"] for results in layout.ranks] == places


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_the_first_step_are_those_of_one_rank(laboratory, name):
    layout, single = laboratory[name], laboratory["single"]
    worst, tensor = difference(layout.tensors("sft_gradients"), single.tensors("sft_gradients"))
    assert worst <= 1e-5, tensor
    for metric, value in single.last["first_step"].items():
        assert layout.last["first_step"][metric] == pytest.approx(value, rel=1e-5), metric


@pytest.mark.parametrize("name", SEVERAL)
def test_supervised_steps_with_the_distributed_optimizer_equal_one_rank(laboratory, name):
    layout, single = laboratory[name], laboratory["single"]
    losses = [[step["loss/sft"] for step in x.last["steps"]] for x in (layout, single)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and len(losses[1]) == STEPS - 1
    worst, tensor = difference(layout.tensors("weights"), single.tensors("weights"))
    assert worst <= 1e-3, tensor


@pytest.mark.parametrize("name", ALL)
def test_every_rank_of_the_last_stage_knows_the_metrics_of_the_whole_batch(laboratory, name):
    layout = laboratory[name]
    for rank, results in enumerate(layout.ranks):
        last = coordinates(rank, layout.sizes).pipeline == layout.sizes.pipeline - 1
        whole = layout.last["first_step"]
        expected = whole if last else {key: value for key, value in whole.items() if "optim/" in key}
        assert results["first_step"] == expected, rank


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_restored_trainer_repeats_the_same_steps_bit_for_bit(laboratory, name):
    for results in laboratory[name].ranks:
        assert results["after_restore"] == results["after_save"]
        first, second = results["after_save"]
        assert first != second
    first, second = laboratory[name].last["after_save"]
    assert first["loss/sft"] != laboratory[name].last["steps"][-1]["loss/sft"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pytest.param("TP2", "DP2", marks=pytest.mark.slow("test_checkpoints resumes DP2 in TP2")),
        pytest.param("EP2xTP2", "EP2", marks=pytest.mark.slow("full grid of layouts")),
    ],
)
def test_a_checkpoint_of_another_layout_continues_with_the_same_losses(laboratory, name, other):
    """The first loss shows the weights, the second one the optimizer's state too."""
    found = laboratory[name].last[f"after_restore_of_{other}"]
    expected = laboratory[other].last["after_save"]
    assert found[0]["loss/sft"] == pytest.approx(expected[0]["loss/sft"], abs=1e-6)
    assert found[0]["optim/grad_norm"] == pytest.approx(expected[0]["optim/grad_norm"], rel=1e-5)
    assert found[1]["loss/sft"] == pytest.approx(expected[1]["loss/sft"], abs=1e-5)


@pytest.mark.slow("test_checkpoints::test_weights_alone_go_where_the_optimizer_cannot")
@pytest.mark.parametrize(("name", "other"), [("EP2", "DP2")])
def test_optimizer_state_that_cannot_move_is_refused(laboratory, name, other):
    for results in laboratory[name].ranks:
        assert results[f"after_restore_of_{other}"][:2] == [
            "checkpoint.load",
            str(laboratory[other].directory / "checkpoint"),
        ]


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_checkpoint_file_is_refused_on_every_rank(laboratory, name):
    directory = laboratory[name].directory / "damaged"
    for rank, results in enumerate(laboratory[name].ranks):
        assert results["damaged"][:2] == ["checkpoint.load", str(directory)], rank
