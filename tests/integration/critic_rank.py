"""One gloo rank of test_critic: a critic without Ray, and a file of what it computed.

    python -m tests.integration.critic_rank JOB.json RANK

It writes what `trainer_rank` writes: `RANK.json`, `RANK.npz` (values by sequence) and gathered tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Group, Prompt
from slimx.extras.preferences.bradley_terry import assign_slopes, pair_rows
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import Rank, demonstrations, microbatch_tokens

QWEN, DEEPSEEK = "Qwen3-MoE", "DeepSeek-V3"
STEPS = 12
"""Optimizer steps of the critic on one batch."""
RATE = 2e-3
CLIP = 0.5
"""Some values move further than this from the old ones, some do not."""


def critic_rows() -> list[TrainingRow]:
    """The demonstrations, with old values and returns that no model said; those of a token depend on its sequence and
    place alone, so that all layouts train the same."""
    trajectories = demonstrations(0)
    rows = make_rows(trajectories, [0.0] * len(trajectories), loss_weights(trajectories, "token"))
    for number, row in enumerate(rows):
        random = np.random.default_rng(100 + number)
        row.values = random.normal(0, 0.6, len(row)).astype(np.float32)
        row.returns = random.normal(1.0, 1.0, len(row)).astype(np.float32)
    return rows


MARGINS = [0.0, 0.5, 1.0, -0.3, 0.0, 2.0, 0.1, 0.0]
"""Of the pairs."""


def preferences() -> list[Group]:
    """The demonstrations in pairs, the first of which is chosen."""
    trajectories = demonstrations(0)
    for number, trajectory in enumerate(trajectories):
        trajectory.reward = float(number % 2 == 0)
    pairs = zip(trajectories[::2], trajectories[1::2], strict=True)
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "?"}])
    return [Group(id=f"g{number}", prompt=prompt, trajectories=list(pair)) for number, pair in enumerate(pairs)]


class CriticRank(Rank):
    """`job["models"]`: checkpoints by family; `job["model"]` is the one in use."""

    def start(self) -> None:
        self.job["model"] = self.job["models"][QWEN]
        super().start()

    def use(self, family: str) -> None:
        from slimx.models.families import read_trunk

        self.family, self.job["model"] = family, self.job["models"][family]
        self.spec = read_trunk(self.config().model)

    def config(self, *, algorithm: str = "ppo", **trainer: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": {"path": self.job["model"]},
                "numerics": {"dtype": self.job.get("dtype", "float32")},
                "trainer": {**self.job["layout"], **trainer},
                "rollout": {"prompts": "p"},
                "schedule": {"steps": STEPS},
                "algorithm": {"name": "ppo"},
                "critic": {
                    "head": "normal",
                    "value_clip": CLIP,
                    "optimizer": {"lr": RATE, "clip_grad": 0.0},
                },
            }
        )

    def critic(self, **trainer: Any) -> Any:
        from slimx.extras.token_level.critic import CriticTrainer

        return CriticTrainer(self.config(**trainer), self.parallel)

    def packed(self, rows: list[TrainingRow]) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches."""
        sizes = self.sizes
        batch = pack(
            rows,
            data_size=sizes.data,
            max_tokens=microbatch_tokens(rows, sizes.data),
            multiple_of=sizes.tensor * sizes.context,
            count_multiple=sizes.pipeline if sizes.virtual > 1 else 1,
            sequence_multiple=2 * sizes.context if sizes.context > 1 else 1,
        )
        assert len(batch.shards[0]) > 1
        return batch.shards[self.parallel.coordinates.data]

    def first_step(self) -> Any:
        """Values and one step."""
        critic = self.critic(distributed_optimizer=False)
        rows = critic_rows()
        batches = self.packed(rows)
        for number, (batch, values) in enumerate(zip(batches, critic.values(batches), strict=False)):
            starts = np.cumsum([0, *batch.lengths])
            for row, start in zip(batch.rows, starts, strict=False):
                self.arrays[f"{self.family}.{number}.{row}"] = values[start : start + len(rows[row])]
        self.said[f"{self.family}.step"] = critic.train_step(batches, step=0)
        return critic

    def reward_model(self) -> None:
        """One step of a reward model on pairs, whose head is the checkpoint's."""
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
        batches = self.packed(rows)
        own = {}
        for batch, values in zip(batches, model.values(batches), strict=False):
            starts = np.cumsum([0, *batch.lengths])
            own |= {row: values[start : start + len(rows[row])] for row, start in zip(batch.rows, starts, strict=False)}
        found: list[Any] = [None] * self.sizes.world
        dist.all_gather_object(found, own)
        scores = {row: values for each in found for row, values in each.items()}
        metrics = assign_slopes(rows, [scores[row] for row in range(len(rows))], MARGINS)
        self.said["pairs.scores"] = [float(scores[row][-1]) for row in range(len(rows))]
        self.said["pairs.step"] = metrics | model.train_step(self.packed(rows), step=0)
        self.write_tensors("pair_gradients", self.gradients(model))
        self.said["pairs.head"] = [each.weight.main_grad.flatten().tolist() for each in model.heads]

    def write_gradients(self, critic: Any) -> None:
        """Without the distributed optimizer every rank has whole gradients."""
        self.write_tensors("gradients", self.gradients(critic))
        modules = [chunk.module for chunk in critic.chunks]
        self.said["head"] = {
            name: parameter.main_grad.flatten().tolist()
            for module in modules
            for name, parameter in module.named_parameters()
            if "value_head" in name
        }

    def on_one_batch(self) -> None:
        """Some steps with the distributed optimizer, a checkpoint between them."""
        critic, batches = self.critic(), self.packed(critic_rows())
        steps = [critic.train_step(batches, step=step) for step in range(STEPS // 2)]
        path = self.out / "checkpoint"
        begin_save(critic, path, step=STEPS // 2)
        rest = range(STEPS // 2, STEPS)
        steps += [critic.train_step(batches, step=step) for step in rest]
        finish_save(critic, path)
        critic.restore(str(path), same_layout=True)
        self.said["steps"] = steps
        self.said["again"] = [critic.train_step(batches, step=step) for step in rest]

    def move_head(self) -> None:
        """Measures the smallest and the largest move of the value head's elements in one step."""
        critic, batches = self.critic(), self.packed(critic_rows())
        heads = {n: p for chunk in critic.chunks for n, p in chunk.named_parameters() if "value_head" in n}
        before = {name: parameter.detach().clone() for name, parameter in heads.items()}
        critic.train_step(batches, step=0)
        moved = {name: (parameter.detach() - before[name]).abs() for name, parameter in heads.items()}
        self.said["moved"] = {name: [float(by.min()), float(by.max())] for name, by in moved.items()}


def main() -> None:
    rank = CriticRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.use(QWEN)
    if rank.job.get("only_head"):
        rank.move_head()
        rank.finish()
        return
    rank.write_gradients(rank.first_step())
    rank.on_one_batch()
    rank.reward_model()
    rank.use(DEEPSEEK)
    rank.first_step()
    rank.finish()


if __name__ == "__main__":
    main()
