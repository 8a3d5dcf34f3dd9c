"""Log-probs and entropies under policy, reference and teacher, of rollouts sampled with and without top-k, against
transformers; the inputs of a loss in a step of two updates. One rank, and two tensor-parallel ones in chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.algorithms.losses.objective import make_loss
from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import MicroBatch, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Trajectory
from slimx.data.sampling_support import Support
from slimx.data.saved.codec import load_groups, save_groups
from slimx.orchestration.batches import make_packer
from tests.integration.conftest import Weights, perturbed
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_oracle import TEMPERATURE, Oracle, difference, rollouts, write_model
from tests.integration.trainer_rank import Rank, by_sequence, packed

pytestmark = pytest.mark.integration

LAYOUTS = {"single": {"world_size": 1}, "TP2": {"world_size": 2, "tensor": 2}}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
HOLDERS = ("policy", "reference", "teacher")
KL = 0.5
DISTILLED = {"teacher_coef": 0.0, "teacher_engine": "wise", "teacher_top_k": 3, "teacher_kl_coef": 0.5}


def likeliest(tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns three tokens of 128 at each position, and their log-probs, each [T, 3]."""
    ids = (7 * labels[:, None] + tokens[:, None] + [0, 45, 90]) % 128
    return ids.astype(np.int64), np.tile(np.log(np.float32([0.4, 0.25, 0.1])), (len(tokens), 1))


class PassesRank(Rank):
    def config(self) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": {"path": self.job["model"]},
                "numerics": {"dtype": "float32"},
                "trainer": {
                    **self.job["layout"],
                    "distributed_optimizer": False,
                    "max_tokens_per_microbatch": 80,
                    "logprob_chunk_tokens": 13,
                    "optimizer": {"lr": 1e-2, "clip_grad": 0.0},
                },
                "rollout": {"prompts": "p"},
                "algorithm": {
                    "name": "grpo",
                    "reference": True,
                    "kl_coef": KL,
                    "teacher": self.job["teacher"],
                    "old_logprobs": "recompute",
                },
            }
        )

    @property
    def reports(self) -> bool:
        return self.rank == self.sizes.world - 1

    def trainer(self) -> Any:
        """Returns one that has taken reference and teacher, then moved to the policy's weights."""
        trainer = super().trainer()
        trainer.weights.load(self.job["policy"])
        return trainer

    def batches(self) -> list[MicroBatch]:
        groups = load_groups(self.job["groups"])
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        config = self.config()
        advantages = [value for group in groups for value in group_advantages(config.algorithm, group)]
        rows = make_rows(trajectories, advantages, loss_weights(trajectories, "token"))
        batch = make_packer(config, self.spec, self.sizes)(rows)
        return batch.shards[self.parallel.coordinates.data]

    def write_scores(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Scores under all weights, twice; what is there before is there afterwards, the optimizer's state too."""
        before = self.weights(trainer)
        arrays = packed(batches)
        for turn in range(2):
            for holder in HOLDERS:
                for number, scores in enumerate(trainer.scores(batches, under=holder)):
                    arrays |= {f"{holder}.{name}.{number}.{turn}": values for name, values in scores.items()}
        self.results["changed"] = [
            name for name, tensor in trainer.weights.parameters.items() if not before[name].equal(tensor)
        ]
        if self.reports:
            np.savez(self.out / "scores.npz", **arrays)

    def write_gradients(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Writes the gradients of one update."""
        self.results["step"] = trainer.train_step(batches, step=0, version=0)
        self.write_tensors("gradients", self.gradients(trainer))

    def distil(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Writes the gradients of the KL with an invented teacher's likeliest tokens, over the whole vocabulary."""
        algorithm = Algorithm(name="distillation", **DISTILLED)
        trainer.loss = make_loss(algorithm)
        taught = []
        for batch in batches:
            ids, logprobs = likeliest(batch.tokens, batch.labels)
            columns = {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}
            taught.append(replace(batch, support=None, advantages=np.zeros_like(batch.advantages), **columns))
        self.results["distilled"] = trainer.train_step(taught, step=0, version=0)
        self.write_tensors("distilled", self.gradients(trainer))

    def two_updates(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Trains on the same micro-batches twice, and keeps the inputs of the loss in each of the updates."""
        recorded: list[Any] = []
        loss = trainer.loss

        def record(inputs: Any) -> Any:
            recorded.append(inputs)
            return loss(inputs)

        trainer.loss = record
        trainer.train_updates([batches, batches], step=0, version=0)
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "teacher_logprobs", "entropy")
        arrays = {f"{name}.{n}": getattr(x, name).detach().numpy() for n, x in enumerate(recorded) for name in names}
        if self.reports:
            np.savez(self.out / "losses.npz", **arrays)

    def refresh(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Keeps whether the reference agrees with the policy, before and after the policy becomes it; and with its
        first log-probs, when it is loaded again."""
        equal, first = [], trainer.logprobs(batches, under="reference")
        for turn in range(2):
            if turn:
                trainer.passes.refresh_reference()
            policy, reference = (trainer.logprobs(batches, under=holder) for holder in ("policy", "reference"))
            equal.append(all(map(np.array_equal, policy, reference)))
        trainer.passes.load_reference(self.job["reference"])
        again = trainer.logprobs(batches, under="reference")
        self.results["reference_is_policy"] = equal
        self.results["reference_is_back"] = all(map(np.array_equal, first, again))


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    rank = PassesRank(job, number)
    batches, trainer = rank.batches(), rank.trainer()
    rank.write_scores(trainer, batches)
    rank.write_gradients(trainer, batches)
    rank.refresh(trainer, batches)
    rank.two_updates(rank.trainer(), batches)
    rank.distil(rank.trainer(), batches)
    return rank.finish()


def restricted(trajectory: Trajectory, random: np.random.Generator) -> Support:
    """Returns 1 to 7 kept tokens at each position where one was sampled."""
    sampled = trajectory.versions() >= 0
    counts = np.where(sampled, random.integers(1, 8, len(sampled)), 0)
    rows = [
        [token, *random.permutation(np.setdiff1d(np.arange(128), token))[: count - 1]]
        for token, count in zip(trajectory.token_ids, counts, strict=True)
        if count
    ]
    return Support(ids=np.concatenate(rows).astype(np.int32), counts=counts.astype(np.int32))


def scores(oracle: Oracle, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probs and entropies [L - 1] over the support, with gradient: plain torch on transformers' logits."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    logits = oracle.model(ids[None]).logits[0, :-1] / TEMPERATURE
    if trajectory.support is not None:
        support = trajectory.support.take(np.arange(1, len(ids)))
        kept = torch.from_numpy(support.counts == 0)[:, None].repeat(1, 128)
        kept[support.positions(), support.ids] = True
        logits = logits.masked_fill(~kept, -1e9)
    values = logits.log_softmax(-1)
    return values.gather(1, ids[1:, None])[:, 0], -(values.exp() * values).sum(-1)


class Laboratory:
    def __init__(self, directory: Path, models: dict[str, Path]):
        self.directory, self.models = directory, models
        self.results: dict[str, dict[str, Any]] = {}
        """Results of the last rank by layout."""
        self.oracles = {name: Oracle(path) for name, path in models.items()}
        self.groups: list[Group] = rollouts(self.oracles["policy"])
        random = np.random.default_rng(0)
        for trajectory in self.trajectories[::2]:
            trajectory.support = restricted(trajectory, random)
        save_groups(directory / "groups.bin", self.groups)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def __call__(self, layout: str) -> Path:
        """Returns the directory of the ranks' files."""
        out = self.directory / layout
        if layout not in self.results:
            job = self.models | {
                "model": self.models["reference"],
                "groups": self.directory / "groups.bin",
                "layout": LAYOUTS[layout],
            }
            self.results[layout] = run_ranks(train, out, LAYOUTS[layout]["world_size"], job)[-1]
        return out


@pytest.fixture(scope="module")
def laboratory(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    directory = tmp_path_factory.mktemp("forward_passes")
    weights = perturbed(tiny_weights, 1, 0.05)
    models = {"reference": weights, "policy": perturbed(weights, 2, 0.01), "teacher": perturbed(weights, 3, 0.03)}
    return Laboratory(directory, {name: write_model(directory / name, tiny_model, w) for name, w in models.items()})


@every_layout
@pytest.mark.parametrize("holder", HOLDERS)
def test_scores_under_each_set_of_weights_are_those_of_transformers(laboratory, layout, holder):
    arrays = np.load(laboratory(layout) / "scores.npz")
    found = [by_sequence(arrays, f"{holder}.{name}.{{}}.0") for name in ("logprobs", "entropy")]
    assert len(found[0]) == len(laboratory.trajectories)
    for trajectory in laboratory.trajectories:
        with torch.no_grad():
            expected = scores(laboratory.oracles[holder], trajectory)
        for values, right in zip(found, expected, strict=True):
            assert np.abs(values[tuple(trajectory.token_ids.tolist())] - right.numpy()).max() <= 1e-5


@every_layout
def test_passes_under_other_weights_change_nothing_and_repeat_bit_for_bit(laboratory, layout):
    with np.load(laboratory(layout) / "scores.npz") as arrays:
        assert laboratory.results[layout]["changed"] == []
        first = [name for name in arrays if name.endswith(".0") and name.count(".") == 3]
        assert len(first) > 2 * len(HOLDERS)
        for name in first:
            assert np.array_equal(arrays[name], arrays[f"{name[:-1]}1"]), name
        policy, teacher = (by_sequence(arrays, f"{holder}.logprobs.{{}}.0") for holder in ("policy", "teacher"))
    assert all(np.abs(policy[tokens] - teacher[tokens]).max() > 1e-2 for tokens in policy)


@every_layout
def test_a_step_with_recomputed_log_probs_is_the_formula_over_the_support(laboratory, layout):
    """The ratio is 1 everywhere, whatever the engine returned; KL to reference and teacher are over the kept tokens."""
    policy = laboratory.oracles["policy"]
    policy.model.zero_grad()
    advantages = [value for group in laboratory.groups for value in group_advantages(Algorithm(), group)]
    trajectories, loss, kls, entropy, engine = laboratory.trajectories, 0.0, [0.0, 0.0], 0.0, 0.0
    for t, advantage, weight in zip(trajectories, advantages, loss_weights(trajectories, "token"), strict=True):
        new, spread = scores(policy, t)
        weight = torch.from_numpy(weight)
        loss = loss - (weight * (new - new.detach()).exp() * advantage).sum()
        for number, name in enumerate(("reference", "teacher")):
            with torch.no_grad():
                other, _ = scores(laboratory.oracles[name], t)
            kls[number] = kls[number] + (weight * ((other - new).exp() - (other - new) - 1)).sum()
        entropy += (weight * spread).sum().item()
        rollout = torch.from_numpy(np.nan_to_num(t.logprobs[1:]))
        gap = torch.where(weight > 0, new - rollout, 0.0).detach()
        engine += (weight * (gap.exp() - gap - 1)).sum().item()
    (loss + KL * kls[0]).backward()
    out = laboratory(layout)
    found = laboratory.results[layout]["step"]
    assert found["loss/policy"] == pytest.approx(loss.item(), abs=1e-6) and found["loss/clip_fraction"] == 0.0
    assert found["kl/reference"] == pytest.approx(kls[0].item(), rel=1e-4) and kls[0] > 1e-4
    assert found["kl/teacher"] == pytest.approx(kls[1].item(), rel=1e-4) and kls[1] > 1e-4
    assert found["policy/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["kl/rollout"] == pytest.approx(engine, rel=1e-4)
    worst, name = difference(load_file(out / "gradients.safetensors"), policy.gradients())
    assert worst <= 1e-5, name


@every_layout
def test_the_kl_of_a_teachers_top_tokens_is_that_of_whole_logits(laboratory, layout):
    """Three tokens and all others as a fourth, on every rank that holds their logits."""
    policy = laboratory.oracles["policy"]
    policy.model.zero_grad()
    trajectories, total = laboratory.trajectories, 0.0
    for t, weight in zip(trajectories, loss_weights(trajectories, "token"), strict=True):
        tokens = t.token_ids.astype(np.int64)
        logits = policy.model(torch.from_numpy(tokens)[None]).logits[0, :-1] / TEMPERATURE
        ids, taught = (torch.from_numpy(part) for part in likeliest(tokens[:-1], tokens[1:]))
        three = logits.softmax(-1).gather(1, ids)
        p = torch.cat([three, 1 - three.sum(1, keepdim=True)], 1)
        q = torch.cat([taught.exp(), 1 - taught.exp().sum(1, keepdim=True)], 1)
        total = total + (torch.from_numpy(weight) * (p * (p / q).log()).sum(1)).sum()
    (DISTILLED["teacher_kl_coef"] * total).backward()
    out = laboratory(layout)
    found = laboratory.results[layout]["distilled"]
    assert found["kl/teacher_top"] == pytest.approx(total.item(), rel=1e-5) and total > 0.1
    worst, name = difference(load_file(out / "distilled.safetensors"), policy.gradients())
    assert worst <= 1e-5, name


@every_layout
def test_every_update_of_a_step_compares_with_the_policy_before_the_first(laboratory, layout):
    out = laboratory(layout)
    with np.load(out / "losses.npz") as inputs, np.load(out / "scores.npz") as before:
        count = sum(name.startswith("tokens.") for name in before)
        assert sum(name.startswith("logprobs.") for name in inputs) == 2 * count
        for number in range(count):
            for name, holder in (("old_logprobs", "policy"), ("reference_logprobs", "reference")):
                expected = before[f"{holder}.logprobs.{number}.0"]
                for update in range(2):
                    assert np.array_equal(inputs[f"{name}.{number + update * count}"], expected)
            assert np.array_equal(inputs[f"logprobs.{number}"], inputs[f"old_logprobs.{number}"])
            second = number + count
            assert np.abs(inputs[f"logprobs.{second}"] - inputs[f"old_logprobs.{second}"]).max() > 1e-2
            assert not np.array_equal(inputs[f"old_logprobs.{number}"], inputs[f"rollout_logprobs.{number}"])


@every_layout
def test_a_refreshed_reference_is_the_current_or_the_saved_policy(laboratory, layout):
    assert laboratory(layout)
    results = laboratory.results[layout]
    assert results["reference_is_policy"] == [False, True] and results["reference_is_back"]
