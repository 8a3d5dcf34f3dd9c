"""A critic computes what transformers' trunk and a linear head compute, in every layout, and learns a fixed batch.

Each layout is one start of real processes that do everything asked below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.config.schema import Config
from slimx.config.sections.trainer import Trainer
from slimx.data.batch import TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Prompt
from slimx.extras.preferences.bradley_terry import assign_slopes, pair_rows
from slimx.layout.ranks import Sizes, coordinates, sizes_of
from slimx.models.families import SCORE
from tests.integration.conftest import Weights, perturbed
from tests.integration.deepseek_v3_oracle import MODELS
from tests.integration.deepseek_v3_oracle import Oracle as DeepseekOracle
from tests.integration.rank_processes import run_ranks
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_oracle import Oracle, difference, write_model
from tests.integration.trainer_rank import Rank, demonstrations, shard

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
QUICK = ("single", "TP2xEP2")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow("full grid of layouts")) for name in LAYOUTS]
SEVERAL = ALL[1:]
QWEN, DEEPSEEK = "Qwen3-MoE", "DeepSeek-V3"
STEPS = 12
"""Optimizer steps of the critic on one batch."""
RATE = 2e-3
CLIP = 0.5
"""Some values move further than this from the old ones, some do not."""
MARGINS = [0.0, 0.5, 1.0, -0.3, 0.0, 2.0, 0.1, 0.0]
"""Margins of the pairs."""


def critic_rows() -> list[TrainingRow]:
    """Returns the demonstrations, with old values and returns of no model; those of a token depend on its sequence and
    place alone, so that all layouts train the same."""
    trajectories = demonstrations(0)
    rows = make_rows(trajectories, [0.0] * len(trajectories), loss_weights(trajectories, "token"))
    for number, row in enumerate(rows):
        random = np.random.default_rng(100 + number)
        row.values = random.normal(0, 0.6, len(row)).astype(np.float32)
        row.returns = random.normal(1.0, 1.0, len(row)).astype(np.float32)
    return rows


def preferences() -> list[Group]:
    """Returns the demonstrations in pairs, the first of which is chosen."""
    trajectories = demonstrations(0)
    for number, trajectory in enumerate(trajectories):
        trajectory.reward = float(number % 2 == 0)
    pairs = zip(trajectories[::2], trajectories[1::2], strict=True)
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "?"}])
    return [Group(id=f"g{number}", prompt=prompt, trajectories=list(pair)) for number, pair in enumerate(pairs)]


class CriticRank(Rank):
    """`job["models"]`: checkpoints by family; `job["model"]` is the one in use."""

    def __init__(self, job: dict[str, Any], rank: int):
        super().__init__(job | {"model": job["models"][QWEN]}, rank)
        self.use(QWEN)

    def use(self, family: str) -> None:
        from slimx.models.families import read_trunk

        self.family, self.job["model"] = family, self.job["models"][family]
        self.spec = read_trunk(self.config().model)

    def config(self, **trainer: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": {"path": self.job["model"]},
                "numerics": {"dtype": self.job.get("dtype", "float32")},
                "trainer": {**self.job["layout"], **trainer},
                "rollout": {"prompts": "p"},
                "schedule": {"steps": STEPS},
                "algorithm": {"name": "ppo"},
                "critic": {"head": "normal", "value_clip": CLIP, "optimizer": {"lr": RATE, "clip_grad": 0.0}},
            }
        )

    def critic(self, **trainer: Any) -> Any:
        from slimx.extras.token_level.critic import CriticTrainer

        return CriticTrainer(self.config(**trainer), self.parallel)

    def first_step(self) -> Any:
        """Computes values and takes one step."""
        critic = self.critic(distributed_optimizer=False)
        rows = critic_rows()
        batches = shard(rows, self.parallel)
        for number, (batch, values) in enumerate(zip(batches, critic.values(batches), strict=False)):
            starts = np.cumsum([0, *batch.lengths])
            for row, start in zip(batch.rows, starts, strict=False):
                self.arrays[f"{self.family}.{number}.{row}"] = values[start : start + len(rows[row])]
        self.results[f"{self.family}.step"] = critic.train_step(batches, step=0)
        return critic

    def train_reward_model(self) -> None:
        """Takes one step of a reward model on pairs, whose head is the checkpoint's."""
        import torch.distributed as dist

        from slimx.extras.preferences.trainer import RewardModelTrainer

        config = self.config(distributed_optimizer=False).model_dump()
        del config["critic"]
        config |= {"algorithm": {"name": "bradley_terry"}, "reward": {"function": None}}
        config["rollout"] = {"prompts": "p", "group_size": 2, "engines": []}
        config["trainer"]["optimizer"] |= {"clip_grad": 0.0}
        config["model"]["path"] = self.job["models"]["scored"]
        model = RewardModelTrainer(Config.model_validate(config), self.spec, self.parallel)
        rows = pair_rows(preferences())
        batches = shard(rows, self.parallel)
        values_here = {}
        for batch, values in zip(batches, model.values(batches), strict=False):
            starts = np.cumsum([0, *batch.lengths])
            values_here |= {
                row: values[start : start + len(rows[row])] for row, start in zip(batch.rows, starts, strict=False)
            }
        found: list[Any] = [None] * self.sizes.world
        dist.all_gather_object(found, values_here)
        scores = {row: values for part in found for row, values in part.items()}
        metrics = assign_slopes(rows, [scores[row] for row in range(len(rows))], MARGINS)
        self.results["pairs.scores"] = [float(scores[row][-1]) for row in range(len(rows))]
        self.results["pairs.step"] = metrics | model.train_step(shard(rows, self.parallel), step=0)
        self.write_tensors("pair_gradients", self.gradients(model))
        self.results["pairs.head"] = [head.weight.main_grad.flatten().tolist() for head in model.heads]

    def write_gradients(self, critic: Any) -> None:
        """Writes gradients: without the distributed optimizer every rank has whole gradients."""
        self.write_tensors("gradients", self.gradients(critic))
        modules = [chunk.module for chunk in critic.chunks]
        self.results["head"] = {
            name: parameter.main_grad.flatten().tolist()
            for module in modules
            for name, parameter in module.named_parameters()
            if "value_head" in name
        }

    def train_on_one_batch(self) -> None:
        """Takes some steps with the distributed optimizer, a checkpoint between them."""
        critic, batches = self.critic(), shard(critic_rows(), self.parallel)
        steps = [critic.train_step(batches, step=step) for step in range(STEPS // 2)]
        path = self.out / "checkpoint"
        begin_save(critic, path, step=STEPS // 2)
        rest = range(STEPS // 2, STEPS)
        steps += [critic.train_step(batches, step=step) for step in rest]
        finish_save(critic, path)
        critic.restore(str(path), same_layout=True)
        self.results["steps"] = steps
        self.results["again"] = [critic.train_step(batches, step=step) for step in rest]

    def move_head(self) -> None:
        """Measures the smallest and the largest move of the value head's elements in one step."""
        critic, batches = self.critic(), shard(critic_rows(), self.parallel)
        heads = {n: p for chunk in critic.chunks for n, p in chunk.named_parameters() if "value_head" in n}
        before = {name: parameter.detach().clone() for name, parameter in heads.items()}
        critic.train_step(batches, step=0)
        moved = {name: (parameter.detach() - before[name]).abs() for name, parameter in heads.items()}
        self.results["moved"] = {name: [float(by.min()), float(by.max())] for name, by in moved.items()}


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    critic = CriticRank(job, rank)
    if job.get("only_head"):
        critic.move_head()
        return critic.finish()
    critic.write_gradients(critic.first_step())
    critic.train_on_one_batch()
    critic.train_reward_model()
    critic.use(DEEPSEEK)
    critic.first_step()
    return critic.finish()


class Ran:
    """Files and results that the ranks of one layout wrote."""

    def __init__(self, directory: Path, sizes: Sizes, results: list[dict[str, Any]]):
        self.directory, self.sizes, self.ranks = directory, sizes, results

    @property
    def last(self) -> dict[str, Any]:
        """Results of the last rank: it belongs to the last pipeline stage, which knows the loss."""
        return self.ranks[-1]

    def values(self, family: str) -> dict[int, np.ndarray]:
        """Returns values by row; ranks that know the values of a row must agree."""
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
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, models: dict[str, Path]):
        self.directory, self.models = directory, models
        self._runs: dict[str, Ran] = {}

    def __getitem__(self, name: str) -> Ran:
        if name not in self._runs:
            self._runs[name] = self.run(name, LAYOUTS[name])
        return self._runs[name]

    def run(self, name: str, layout: dict[str, Any], **options: Any) -> Ran:
        """Runs the ranks; `options`: further keys of the ranks' job."""
        out, sizes = self.directory / name, sizes_of(Trainer(**layout))
        job = {"models": self.models, "layout": layout, **options}
        return Ran(out, sizes, run_ranks(train, out, sizes.world, job))


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
        """Returns [n] per row, with gradient."""
        rows = critic_rows()
        ids = torch.ones(len(rows), max(map(len, rows)), dtype=torch.int64)
        for at, row in zip(ids, rows, strict=True):
            at[: len(row)] = torch.from_numpy(row.tokens)
        values = self.head(self.trunk(ids).last_hidden_state)[..., 0]
        return [value[: len(row)] for value, row in zip(values, rows, strict=True)]

    def loss(self) -> torch.Tensor:
        """Returns PPO's clipped value loss over the trained tokens of all rows."""
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
        # A trunk with the head of an exported reward model.
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
    for rank, results in enumerate(layout.ranks):
        last = coordinates(rank, layout.sizes).pipeline == layout.sizes.pipeline - 1
        assert (results["head"] != {}) == last
        for tensor, gradient in results["head"].items():
            expected = single.last["head"][tensor]
            assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-5 * max(map(abs, expected))), tensor


@pytest.mark.parametrize("name", ALL)
def test_a_restored_critic_repeats_its_steps_bit_for_bit(laboratory, name):
    losses = [step["value/loss"] for step in laboratory[name].last["steps"]]
    assert len(losses) == STEPS and losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx([step["value/loss"] for step in laboratory["single"].last["steps"]], rel=1e-3)
    for results in laboratory[name].ranks:
        assert results["again"] == results["steps"][STEPS // 2 :]


def test_the_fp32_head_of_an_interleaved_bf16_critic_moves_as_adam_says(laboratory):
    layout = {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2, "layers_per_stage": [1, 0, 0, 1]}
    ran = laboratory.run("bf16", layout, dtype="bfloat16", only_head=True)
    moved = ran.last["moved"]
    assert len(moved) == 2 and ran.ranks[0]["moved"] == {}
    for smallest, largest in moved.values():
        # Adam's first step is the learning rate, whatever the gradient.
        assert smallest == pytest.approx(RATE, rel=1e-2) and largest == pytest.approx(RATE, rel=1e-2)
