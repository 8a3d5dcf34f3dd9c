"""One gloo rank of test_forward_passes: passes under three sets of weights, and a step of two updates.

    python -m tests.integration.forward_passes_rank JOB.json RANK

The last rank writes `scores.npz` (per micro-batch and weights), `losses.npz` (what the loss was given) and `said.json`;
all together `gradients.safetensors` of a step of one update, and `distilled.safetensors` of one that learns from the
likeliest tokens of an invented teacher.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.algorithms.losses.objective import make_loss
from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import MicroBatch, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.saved.codec import load_groups
from slimx.orchestration.batches import make_packer
from tests.integration import rank_start
from tests.integration.gathering import write_tensors

HOLDERS = ("policy", "reference", "teacher")
KL = 0.5
DISTILLED = {"teacher_coef": 0.0, "teacher_engine": "wise", "teacher_top_k": 3, "teacher_kl_coef": 0.5}


def likeliest(tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Three tokens of 128 at each position, and their log-probs, each [T, 3]."""
    ids = (7 * labels[:, None] + tokens[:, None] + [0, 45, 90]) % 128
    return ids.astype(np.int64), np.tile(np.log(np.float32([0.4, 0.25, 0.1])), (len(tokens), 1))


class Rank:
    def __init__(self, job: dict[str, Any], rank: int):
        self.job, self.rank, self.out = job, rank, Path(job["out"])
        self.said: dict[str, Any] = {}
        self.config = Config.model_validate(
            {
                "run": {"dir": job["out"]},
                "model": {"path": job["reference"]},
                "numerics": {"dtype": "float32"},
                "trainer": {
                    **job["layout"],
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
                    "teacher": job["teacher"],
                    "old_logprobs": "recompute",
                },
            }
        )
        self.parallel = rank_start.join(self.config.trainer, rank, job["init_method"])
        from slimx.models.families import read_model

        self.spec, self.sizes = read_model(job["reference"]), self.parallel.sizes

    @property
    def reports(self) -> bool:
        return self.rank == self.sizes.world - 1

    def trainer(self) -> Any:
        """Reference and teacher taken, then moved to the policy's weights."""
        from slimx.trainer.trainer import PolicyTrainer

        trainer = PolicyTrainer(self.config, self.spec, self.parallel)
        trainer.weights.load(self.job["policy"])
        return trainer

    def batches(self) -> list[MicroBatch]:
        groups = load_groups(self.job["groups"])
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        advantages = [value for group in groups for value in group_advantages(self.config.algorithm, group)]
        rows = make_rows(trajectories, advantages, loss_weights(trajectories, "token"))
        batch = make_packer(self.config, self.spec, self.sizes)(rows)
        return batch.shards[self.parallel.coordinates.data]

    def passes(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Scores under all weights, twice; what is there before is there afterwards, the optimizer's state too."""
        before = {name: tensor.detach().clone() for name, tensor in trainer.weights.parameters.items()}
        arrays = {}
        for turn in range(2):
            for holder in HOLDERS:
                for number, scores in enumerate(trainer.scores(batches, under=holder)):
                    arrays |= {f"{holder}.{name}.{number}.{turn}": values for name, values in scores.items()}
        self.said["changed"] = [
            name for name, tensor in trainer.weights.parameters.items() if not before[name].equal(tensor)
        ]
        for number, batch in enumerate(batches):
            arrays |= {f"{key}.{number}": getattr(batch, key) for key in ("tokens", "labels")}
            arrays[f"lengths.{number}"] = np.array(batch.lengths)
        if self.reports:
            np.savez(self.out / "scores.npz", **arrays)

    def gradients(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Writes the gradients of one update."""
        self.said["step"] = trainer.train_step(batches, step=0, version=0)
        tensors = {name: parameter.main_grad for name, parameter in trainer.weights.parameters.items()}
        write_tensors(self.out / "gradients.safetensors", tensors, self.spec, self.parallel)

    def distilled(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Writes the gradients of the KL with an invented teacher's likeliest tokens, over the whole vocabulary."""
        algorithm = Algorithm(name="distillation", **DISTILLED)
        trainer.loss = make_loss(algorithm)
        taught = []
        for batch in batches:
            ids, logprobs = likeliest(batch.tokens, batch.labels)
            given = {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}
            taught.append(replace(batch, support=None, advantages=np.zeros_like(batch.advantages), **given))
        self.said["distilled"] = trainer.train_step(taught, step=0, version=0)
        tensors = {name: parameter.main_grad for name, parameter in trainer.weights.parameters.items()}
        write_tensors(self.out / "distilled.safetensors", tensors, self.spec, self.parallel)

    def two_updates(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """The same micro-batches twice: what the loss is given in each of the updates."""
        given: list[Any] = []
        loss = trainer.loss

        def recorded(inputs: Any) -> Any:
            given.append(inputs)
            return loss(inputs)

        trainer.loss = recorded
        trainer.train_updates([batches, batches], step=0, version=0)
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "teacher_logprobs", "entropy")
        arrays = {f"{name}.{n}": getattr(x, name).detach().numpy() for n, x in enumerate(given) for name in names}
        if self.reports:
            np.savez(self.out / "losses.npz", **arrays)

    def refresh(self, trainer: Any, batches: list[MicroBatch]) -> None:
        """Whether the reference says what the policy says, before and after the policy becomes it; and whether it says
        what it said at first, when it is loaded again."""
        equal, first = [], trainer.logprobs(batches, under="reference")
        for turn in range(2):
            if turn:
                trainer.passes.refresh_reference()
            policy, reference = (trainer.logprobs(batches, under=holder) for holder in ("policy", "reference"))
            equal.append(all(map(np.array_equal, policy, reference)))
        trainer.passes.load_reference(self.job["reference"])
        again = trainer.logprobs(batches, under="reference")
        self.said["reference_is_policy"] = equal
        self.said["reference_is_back"] = all(map(np.array_equal, first, again))

    def finish(self) -> None:
        if self.reports:
            (self.out / "said.json").write_text(json.dumps(self.said))
        rank_start.leave(self.parallel)


def main() -> None:
    rank = Rank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    batches = rank.batches()
    trainer = rank.trainer()
    rank.passes(trainer, batches)
    rank.gradients(trainer, batches)
    rank.refresh(trainer, batches)
    rank.two_updates(rank.trainer(), batches)
    rank.distilled(rank.trainer(), batches)
    rank.finish()


if __name__ == "__main__":
    main()
