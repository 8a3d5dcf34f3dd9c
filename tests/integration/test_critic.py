"""A critic computes what transformers' trunk and a linear head compute, in every layout, and learns a fixed batch.

Each layout is one start of real processes that do everything asked below; `critic_rank.py` is one of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.layout.ranks import Sizes, coordinates
from slimx.models.families import SCORE
from slimx.runtime.ports import free_port
from tests.integration.conftest import Weights, perturbed
from tests.integration.critic_rank import CLIP, DEEPSEEK, MARGINS, QWEN, RATE, STEPS, critic_rows, preferences
from tests.integration.deepseek_v3_oracle import MODELS
from tests.integration.deepseek_v3_oracle import Oracle as DeepseekOracle
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_oracle import Oracle, difference, write_model

pytestmark = pytest.mark.integration

LAYOUTS = {
    "single": {"world_size": 1},
    "PP2": {"world_size": 2, "pipeline": 2},
    "TP2xEP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "EP2xTP2": {"world_size": 4, "tensor": 2, "expert": 2},
    "DP2": {"world_size": 2},
    "TP2": {"world_size": 2, "tensor": 2},
    "CP2xPP2": {"world_size": 4, "context": 2, "pipeline": 2},
}
SIZES = {
    "single": Sizes(),
    "PP2": Sizes(pipeline=2),
    "TP2xEP2": Sizes(tensor=2, expert=2),
    "EP2xTP2": Sizes(tensor=2, data=2, expert=2, expert_tensor=2),
    "DP2": Sizes(data=2),
    "TP2": Sizes(tensor=2, expert_tensor=2),
    "CP2xPP2": Sizes(context=2, pipeline=2),
}
QUICK = ("single", "TP2xEP2")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow("full grid of layouts")) for name in LAYOUTS]
SEVERAL = ALL[1:]


class Ran:
    """What the ranks of one layout wrote."""

    def __init__(self, directory: Path, sizes: Sizes):
        self.directory, self.sizes = directory, sizes
        self.ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(sizes.world)]

    @property
    def last(self) -> dict[str, Any]:
        """What the last rank said: it belongs to the last pipeline stage, which knows the loss."""
        return self.ranks[-1]

    def values(self, family: str) -> dict[int, np.ndarray]:
        """By row; every rank that knows a row's values must say the same."""
        out: dict[int, np.ndarray] = {}
        for rank in range(self.sizes.world):
            with np.load(self.directory / f"{rank}.npz") as arrays:
                for name in (name for name in arrays if name.startswith(f"{family}.")):
                    row = int(name.rpartition(".")[2])
                    assert np.array_equal(out.setdefault(row, arrays[name]), arrays[name])
        return out

    def gradients(self) -> Weights:
        return load_file(self.directory / "gradients.safetensors")


class Laboratory:
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, models: dict[str, Path]):
        self.directory = directory
        self.models = {family: str(path) for family, path in models.items()}
        self._done: dict[str, Ran] = {}

    def __getitem__(self, name: str) -> Ran:
        if name not in self._done:
            self._done[name] = self.run(name, LAYOUTS[name], SIZES[name])
        return self._done[name]

    def run(self, name: str, layout: dict[str, Any], sizes: Sizes, **options: Any) -> Ran:
        """`options`: further keys of the ranks' job."""
        out = self.directory / name
        out.mkdir()
        job = {"models": self.models, "layout": layout, "out": str(out), **options}
        job["init_method"] = f"tcp://127.0.0.1:{free_port()}"
        (out / "job.json").write_text(json.dumps(job))
        run_ranks("tests.integration.critic_rank", out, sizes.world)
        return Ran(out, sizes)


class ValueOracle:
    """A trunk in transformers with a linear head in plain torch."""

    def __init__(self, model: torch.nn.Module):
        hidden = model.config.hidden_size
        self.trunk, self.head = model.model, torch.nn.Linear(hidden, 1)
        with torch.no_grad():
            # As the seed of the run (1) draws it.
            self.head.weight.normal_(0, (hidden + 1) ** -0.5, generator=torch.Generator().manual_seed(1))
            self.head.bias.zero_()
        model.zero_grad()
        self.loss().backward()
        parameters = (*self.trunk.parameters(), *self.head.parameters())
        self.gradient_norm = float(sum(p.grad.double().square().sum() for p in parameters if p.grad is not None)) ** 0.5

    def values(self) -> list[torch.Tensor]:
        """[n] per row, with gradient."""
        rows = critic_rows()
        ids = torch.ones(len(rows), max(map(len, rows)), dtype=torch.int64)
        for at, row in zip(ids, rows, strict=True):
            at[: len(row)] = torch.from_numpy(row.tokens)
        values = self.head(self.trunk(ids).last_hidden_state)[..., 0]
        return [value[: len(row)] for value, row in zip(values, rows, strict=True)]

    def loss(self) -> torch.Tensor:
        """PPO's clipped value loss over the trained tokens of all rows."""
        total = torch.zeros(())
        for row, values in zip(critic_rows(), self.values(), strict=True):
            old, returns = torch.from_numpy(row.values), torch.from_numpy(row.returns)
            clipped = old + (values - old).clamp(-CLIP, CLIP)
            worst = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
            total = total + 0.5 * (torch.from_numpy(row.weight) * worst).sum()
        return total


class PairOracle:
    """A trunk in transformers with a score head in plain torch, and the Bradley-Terry loss of the pairs."""

    def __init__(self, model: torch.nn.Module, head: torch.Tensor):
        self.trunk, self.head = model.model, head.clone().requires_grad_()
        model.zero_grad()
        scores = []
        for group in preferences():
            for trajectory in group.trajectories:
                ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
                scores.append(self.trunk(ids).last_hidden_state[0, -1] @ self.head[0])
        self.scores = torch.stack(scores)
        difference = self.scores[::2] - self.scores[1::2]
        self.loss = -torch.nn.functional.logsigmoid(difference - torch.tensor(MARGINS)).mean()
        self.accuracy = (difference > 0).float().mean().item()
        self.loss.backward()


class Models:
    """The checkpoints, whose attention and routing are far from uniform, and what they say."""

    def __init__(self, directory: Path, tiny_model: Path, tiny_weights: Weights):
        weights = perturbed(tiny_weights, 1, 0.05)
        path = write_model(directory / "qwen", tiny_model, weights)
        self.qwen = Oracle(path)
        # With a layer of multi-token prediction, which a critic leaves in the checkpoint.
        deepseek = DeepseekOracle(directory / "deepseek", 0, MODELS["V3"])
        self.paths = {QWEN: path, DEEPSEEK: deepseek.path}
        self.head = torch.randn(1, self.qwen.model.config.hidden_size, generator=torch.Generator().manual_seed(3)) / 4
        # The head of an exported reward model beside a trunk.
        scored = write_model(directory / "scored", tiny_model, {**weights, SCORE: self.head})
        self.paths["scored"] = scored
        self.oracles = {QWEN: ValueOracle(self.qwen.model), DEEPSEEK: ValueOracle(deepseek.model)}
        self.gradients = self.trunk_gradients()
        """Gradients of QWEN's value loss, by name; gradients of pairs replace them in the model later."""

    def trunk_gradients(self) -> Weights:
        return {name: value for name, value in self.qwen.named(lambda p: p.grad).items() if name != "lm_head.weight"}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), tiny_model, tiny_weights)


@pytest.fixture(scope="module")
def laboratory(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("critics"), models.paths)


@pytest.mark.parametrize("family", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("name", ALL)
def test_values_and_loss_are_those_of_transformers_trunk_and_a_linear_head(laboratory, models, name, family):
    found, oracle = laboratory[name].values(family), models.oracles[family]
    with torch.no_grad():
        expected, loss = oracle.values(), oracle.loss().item()
    assert found.keys() == set(range(len(expected)))
    assert max(value.abs().max() for value in expected) > 0.5, "the values must differ from an untrained head's zeros"
    for row, values in enumerate(expected):
        assert np.abs(found[row] - values.numpy()).max() <= 1e-5
    step = laboratory[name].last[f"{family}.step"]
    assert step["value/loss"] == pytest.approx(loss, rel=1e-5) and 0.05 < step["value/clip_fraction"] < 0.95
    assert step["critic/grad_norm"] == pytest.approx(oracle.gradient_norm, rel=1e-4)


def test_gradients_of_one_rank_are_those_of_transformers_and_torch(laboratory, models):
    single, head = laboratory["single"], models.oracles[QWEN].head
    worst, name = difference(single.gradients(), models.gradients)
    assert worst <= 1e-5, name
    found = single.last["head"]
    assert found["value_head.weight"] == pytest.approx(head.weight.grad[0].tolist(), rel=1e-4, abs=1e-6)
    assert found["value_head.bias"] == pytest.approx(head.bias.grad.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_reward_model_has_the_bradley_terry_loss_of_plain_torch(laboratory, models, name):
    ran, oracle = laboratory[name], PairOracle(models.qwen.model, models.head)
    step = ran.last["pairs.step"]
    assert ran.last["pairs.scores"] == pytest.approx(oracle.scores.tolist(), abs=1e-5)
    assert step["preference/loss"] == pytest.approx(oracle.loss.item(), rel=1e-5)
    assert step["preference/accuracy"] == oracle.accuracy and 0 < oracle.accuracy < 1
    worst, tensor = difference(load_file(ran.directory / "pair_gradients.safetensors"), models.trunk_gradients())
    assert worst <= 1e-5, tensor
    (head,) = ran.last["pairs.head"]
    assert head == pytest.approx(oracle.head.grad[0].tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_and_metrics_are_those_of_one_rank(laboratory, name):
    layout, single = laboratory[name], laboratory["single"]
    worst, tensor = difference(layout.gradients(), single.gradients())
    assert worst <= 1e-5, tensor
    for metric, value in single.last[f"{QWEN}.step"].items():
        assert layout.last[f"{QWEN}.step"][metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    for rank, said in enumerate(layout.ranks):
        last = coordinates(rank, layout.sizes).pipeline == layout.sizes.pipeline - 1
        assert (said["head"] != {}) == last
        for tensor, gradient in said["head"].items():
            expected = single.last["head"][tensor]
            assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-5 * max(map(abs, expected))), tensor


@pytest.mark.parametrize("name", ALL)
def test_a_restored_critic_repeats_its_steps_bit_for_bit(laboratory, name):
    losses = [step["value/loss"] for step in laboratory[name].last["steps"]]
    assert len(losses) == STEPS and losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx([step["value/loss"] for step in laboratory["single"].last["steps"]], rel=1e-3)
    for said in laboratory[name].ranks:
        assert said["again"] == said["steps"][STEPS // 2 :]


def test_the_fp32_head_of_an_interleaved_bf16_critic_moves_as_adam_says(laboratory):
    layout = {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2, "layers_per_stage": [1, 0, 0, 1]}
    ran = laboratory.run("bf16", layout, Sizes(pipeline=2, virtual=2), dtype="bfloat16", only_head=True)
    moved = ran.last["moved"]
    assert len(moved) == 2 and ran.ranks[0]["moved"] == {}
    for smallest, largest in moved.values():
        # Adam's first step is the learning rate, whatever the gradient.
        assert smallest == pytest.approx(RATE, rel=1e-2) and largest == pytest.approx(RATE, rel=1e-2)
