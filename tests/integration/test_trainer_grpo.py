"""A GRPO step of trainers on saved rollouts: the formula over transformers' log-probs, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group
from slimx.data.saved.codec import load_groups, save_groups
from slimx.layout.ranks import coordinates
from tests.integration.conftest import Weights, perturbed
from tests.integration.layouts import ALL, LAYOUTS, SEVERAL, SIZES
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.trainer_oracle import TEMPERATURE, VERSION, Oracle, difference, rollouts, write_model
from tests.integration.trainer_rank import Rank, shard

pytestmark = pytest.mark.integration


class GrpoRank(Rank):
    optimizer = {"lr": 2e-3, "clip_grad": 0.0}

    def config(self) -> Config:
        config = super().config(distributed_optimizer=False).model_dump()
        grpo = {"name": "grpo", "loss": {"low": 0.2, "high": 0.3}, "reference": True, "kl_coef": 0.5}
        return Config.model_validate(config | {"algorithm": grpo, "rollout": {"prompts": "p"}})


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    """Takes one step on saved rollouts: the policy is another set of weights than the reference."""
    rank = GrpoRank(job, number)
    groups = load_groups(job["groups"])
    trainer = rank.trainer()
    trainer.weights.load(job["policy"])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = [value for group in groups for value in group_advantages(trainer.config.algorithm, group)]
    batches = shard(make_rows(trajectories, advantages, loss_weights(trajectories, "token")), rank.parallel)
    rank.results["gap"] = trainer.measure_gap(batches, version=VERSION)
    rank.results["mismatch"] = trainer.measure_gap(batches, version=VERSION, mismatch=True)
    rank.results["step"] = trainer.train_step(batches, step=0, version=VERSION)
    rank.results["trained_tokens"] = trained = []
    for found, batch in zip(*(trainer.trained_tokens() or [[]]), batches, strict=False):
        measured = (batch.weight > 0) & (batch.versions == VERSION)
        gap = np.abs(found["logprobs"] - batch.rollout_logprobs)[measured]
        trained.append(
            [float(gap.max(initial=0)), float(gap.astype(float).sum()), int(found["other_experts"][measured].sum())]
        )
    rank.results["second_read"] = trainer.trained_tokens()
    rank.write_tensors("gradients", rank.gradients(trainer))
    return rank.finish()


class Laboratory:
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, inputs: dict[str, Path]):
        self.directory, self.inputs = directory, inputs
        self.results = cached(self._run)

    def _run(self, layout: str) -> list[dict[str, Any]]:
        return run_ranks(train, self.directory / layout, SIZES[layout].world, self.inputs | {"layout": LAYOUTS[layout]})

    def __getitem__(self, layout: str) -> dict[str, Any]:
        """Returns results of the last rank: it belongs to the last pipeline stage, which knows the loss."""
        return self.results(layout)[-1]

    def gradients(self, layout: str) -> Weights:
        assert self[layout]
        return load_file(self.directory / layout / "gradients.safetensors")


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Makes two models whose attention and routing are far from uniform."""
    directory = tmp_path_factory.mktemp("models")
    weights = perturbed(tiny_weights, 1, 0.05)
    return {
        "model": write_model(directory / "model", tiny_model, weights),
        "policy": write_model(directory / "policy", tiny_model, perturbed(weights, 2, 0.01)),
    }


@pytest.fixture(scope="module")
def oracles(models: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(path) for name, path in models.items()}


@pytest.fixture(scope="module")
def groups(oracles: dict[str, Oracle]) -> list[Group]:
    return rollouts(oracles["policy"])


@pytest.fixture(scope="module")
def laboratory(models: dict[str, Path], groups: list[Group], tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    directory = tmp_path_factory.mktemp("layouts")
    save_groups(directory / "groups.bin", groups)
    return Laboratory(directory, models | {"groups": directory / "groups.bin"})


def test_a_grpo_step_of_one_rank_is_the_formula_over_transformers_logprobs(laboratory, oracles, groups):
    policy, reference = oracles["policy"], oracles["model"]
    policy.model.zero_grad()
    trajectories = [t for group in groups for t in group.trajectories]
    algorithm = Algorithm(loss={"low": 0.2, "high": 0.3})
    advantages = [value for group in groups for value in group_advantages(algorithm, group)]
    surrogate, kl, clipped, gaps, above, below = torch.zeros(()), torch.zeros(()), 0.0, [], 0, 0
    tokens, weights = [t.token_ids for t in trajectories], loss_weights(trajectories, "token")
    with torch.no_grad():
        others = reference.logprobs(tokens, TEMPERATURE)
    rows = zip(trajectories, advantages, weights, policy.logprobs(tokens, TEMPERATURE), others, strict=True)
    for t, advantage, weight, new, other in rows:
        trained = weight > 0
        new, other, weight = new[trained], other[trained], torch.from_numpy(weight[trained])
        old = torch.from_numpy(t.logprobs[1:])[trained]
        ratio = (new - old).exp()
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        surrogate = surrogate - (weight * terms).sum()
        kl = kl + (weight * ((other - new).exp() - (other - new) - 1)).sum()
        clipped += weight[(ratio * advantage > terms)].sum().item()
        above, below = above + int((ratio > 1.3).sum()), below + int((ratio < 0.8).sum())
        if t.oldest_version == VERSION:
            gaps += (new - old).abs().tolist()
    (surrogate + 0.5 * kl).backward()
    assert above > 5 and below > 5 and 0.05 < clipped < 0.5 and kl.item() > 1e-4, "the rollouts must exercise the loss"
    found = laboratory["single"]["step"]
    assert found["loss/policy"] == pytest.approx(surrogate.item(), abs=1e-5)
    assert found["loss/clip_fraction"] == pytest.approx(clipped, abs=1e-6)
    assert found["kl/reference"] == pytest.approx(kl.item(), abs=1e-6)
    assert found["gap/tokens"] == len(gaps)
    assert found["gap/mean"] == pytest.approx(np.mean(gaps), abs=1e-5)
    assert found["gap/max"] == pytest.approx(max(gaps), abs=1e-5)
    worst, name = difference(laboratory.gradients("single"), policy.gradients())
    assert worst <= 1e-5, name


@pytest.mark.parametrize("name", SEVERAL)
def test_a_grpo_step_on_saved_rollouts_is_that_of_one_rank(laboratory, name):
    layout, single = laboratory[name]["step"], laboratory["single"]["step"]
    assert layout.keys() == single.keys()
    for metric, value in single.items():
        assert layout[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    worst, tensor = difference(laboratory.gradients(name), laboratory.gradients("single"))
    assert worst <= 1e-5, tensor


@pytest.mark.parametrize("name", ALL)
def test_positions_with_other_experts_than_the_engines_are_counted_exactly(laboratory, groups, name):
    """The measured tokens, whose gaps exceed 1e-5, are counted: differing here, explained here or earlier,
    unexplained."""
    here = explained = measured = 0
    for t in (t for group in groups for t in group.trajectories if t.oldest_version == VERSION):
        trained = t.loss_mask[1:] > 0
        differs = np.isin(np.arange(len(trained)), t.metadata["corrupted"])
        here += int((differs & trained).sum())
        explained += int((np.maximum.accumulate(differs) & trained).sum())
        measured += int(trained.sum())
    assert 0 < here < explained < measured
    found = laboratory[name]["step"]
    counts = ("routes/differing", "gap/tokens_other_routes", "gap/tokens_unexplained", "gap/tokens_above_1e-5")
    assert [found[count] for count in counts] == [here, explained, measured - explained, measured]


@pytest.mark.parametrize("name", ALL)
def test_the_measured_gap_equals_that_of_the_step(laboratory, name):
    measured, step = laboratory[name]["gap"], laboratory[name]["step"]
    assert measured == {key: step[key] for key in step if key.startswith(("gap/", "routes/"))}
    assert len(measured) == 8
    mismatch = {key: step[key] for key in step if key.startswith("mismatch/")}
    assert laboratory[name]["mismatch"] == measured | mismatch and len(mismatch) == 5


@pytest.mark.parametrize("name", ALL)
def test_per_token_values_of_a_step_add_up_to_its_metrics(laboratory, name):
    ranks, step = laboratory.results(name), laboratory[name]["step"]
    whole = [
        [*batch]
        for rank, results in enumerate(ranks)
        if (place := coordinates(rank, SIZES[name])).tensor == place.context == 0
        for batch in results["trained_tokens"]
    ]
    assert max(batch[0] for batch in whole) == step["gap/max"] > 0
    assert sum(batch[1] for batch in whole) / step["gap/tokens"] == pytest.approx(step["gap/mean"], rel=1e-9)
    assert sum(batch[2] for batch in whole) == step["routes/differing"] > 0
    assert all(results["second_read"] == [] for results in ranks), "values are read once"


@pytest.mark.parametrize("name", ALL)
def test_every_rank_of_the_last_stage_knows_the_metrics_of_the_step(laboratory, name):
    sizes, whole = SIZES[name], laboratory[name]["step"]
    for rank, results in enumerate(laboratory.results(name)):
        last = coordinates(rank, sizes).pipeline == sizes.pipeline - 1
        expected = whole if last else {key: value for key, value in whole.items() if "optim/" in key}
        assert results["step"] == expected, rank
