"""One gloo rank of test_trainer_layouts: real trainers without Ray, and a file of what they computed.

    python -m tests.integration.trainer_rank JOB.json RANK

The process begins as `slimx.trainer.worker` does: adapters first, megatron-core after them. It writes `RANK.json`
(metrics and texts) and `RANK.npz` (log-probs by sequence); rank 0 adds gathered weights and gradients under their
Hugging Face names as safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Span, Trajectory
from slimx.data.saved.codec import load_groups
from tests.integration import rank_start
from tests.integration.gathering import write_tensors
from tests.integration.saving import begin_save, finish_save
from tests.refusals import told

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
"""Of the ten steps and the two after them."""
MAX_TOKENS = 60
"""Tokens: no limit of a micro-batch is smaller."""
VERSION = 3
"""The engines' weight version at the GRPO step."""


def demonstrations(step: int) -> list[Trajectory]:
    """16 sequences of 6 to 39 tokens, of which the first four are a prompt; three tokens in four follow from the one
    before, so that there is something to learn. Id 0 is padding and never among them."""
    random = np.random.default_rng(step)
    out = []
    for index in range(16):
        length = int(random.integers(6, 40))
        tokens = random.integers(1, 128, length)
        for at in np.flatnonzero(random.random(length - 1) < 0.75):
            tokens[at + 1] = 1 + (5 * tokens[at] + 3) % 127
        out.append(
            Trajectory(
                id=str(index),
                rollout_id=str(index),
                group_id=str(index),
                index=0,
                token_ids=tokens.astype(np.int32),
                loss_mask=np.array([0] * 4 + [1] * (length - 4), np.uint8),
                logprobs=np.full(length, np.nan, np.float32),
                spans=[Span(start=0, stop=length, source="inserted")],
            )
        )
    return out


def microbatch_tokens(rows: Sequence[TrainingRow], data: int) -> int:
    """Returns the `max_tokens` of `pack` that leaves each of `data` data-parallel ranks a few micro-batches, as few as
    show that gradients add up over them: each costs a forward and a backward pass of every test."""
    return max(MAX_TOKENS, round(0.6 * sum(map(len, rows)) / data))


class Rank:
    """The work of one rank, step by step; `main` has the order."""

    def __init__(self, job: dict[str, Any], rank: int):
        self.job, self.rank, self.out = job, rank, Path(job["out"])
        self.said: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def start(self) -> None:
        settings = self.config(algorithm="sft").trainer
        self.parallel = rank_start.join(settings, self.rank, self.job["init_method"])
        from slimx.models.families import read_model

        self.spec, self.sizes = read_model(self.job["model"]), self.parallel.sizes

    def config(self, *, algorithm: str, optimizer: dict[str, Any] | None = None, **trainer: Any) -> Config:
        grpo = {"name": "grpo", "loss": {"low": 0.2, "high": 0.3}, "reference": True, "kl_coef": 0.5}
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": {"path": self.job["model"]},
                "numerics": {"dtype": "float32"},
                "trainer": {
                    **self.job["layout"],
                    **trainer,
                    "max_tokens_per_microbatch": MAX_TOKENS,
                    "optimizer": {"lr": 2e-3, **(optimizer or {})},
                },
                "rollout": {"prompts": "p", **({"engines": []} if algorithm == "sft" else {})},
                "schedule": {"steps": (STEPS + 2) // 2, "updates_per_step": 2},
                "algorithm": grpo if algorithm == "grpo" else {"name": "sft"},
            }
        )

    def trainer(self, config: Config) -> Any:
        from slimx.trainer.trainer import PolicyTrainer

        return PolicyTrainer(config, self.spec, self.parallel)

    def shard(self, trajectories: list[Trajectory], advantages: list[float]) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches."""
        rows = make_rows(trajectories, advantages, loss_weights(trajectories, "token"))
        batch = pack(
            rows,
            data_size=self.sizes.data,
            max_tokens=microbatch_tokens(rows, self.sizes.data),
            multiple_of=self.sizes.tensor * self.sizes.context,
            sequence_multiple=self.sizes.sequence_multiple,
            # Interleaved pipelines go round in turns of as many micro-batches as there are stages.
            count_multiple=self.sizes.pipeline if self.sizes.virtual > 1 else 1,
        )
        assert len(batch.shards[0]) > 1
        return batch.shards[self.parallel.coordinates.data]

    def demonstrated(self, step: int) -> list[MicroBatch]:
        trajectories = demonstrations(step)
        return self.shard(trajectories, [1.0] * len(trajectories))

    def write_tensors(self, name: str, tensors: dict[str, Any]) -> None:
        write_tensors(self.out / f"{name}.safetensors", tensors, self.spec, self.parallel)

    def gradients(self, trainer: Any) -> dict[str, Any]:
        """By local name; zeros for a buffer, which has none."""
        import torch

        named = trainer.weights.parameters.items()
        return {name: getattr(value, "main_grad", torch.zeros(value.shape)) for name, value in named}

    def barrier(self) -> None:
        self.parallel.host_group.barrier().wait()

    # What is asked ----------------------------------------------------------------------------------------------------

    def first_step(self) -> None:
        """Log-probs and gradients of one SFT step. Without the distributed optimizer every rank has whole gradients."""
        trainer = self.trainer(self.config(algorithm="sft", distributed_optimizer=False, optimizer={"clip_grad": 0.0}))
        batches = self.demonstrated(0)
        for number, (batch, logprobs) in enumerate(zip(batches, trainer.logprobs(batches), strict=False)):
            for key in ("tokens", "labels"):
                self.arrays[f"{key}.{number}"] = getattr(batch, key)
            self.arrays[f"lengths.{number}"] = np.array(batch.lengths)
            self.arrays[f"logprobs.{number}"] = logprobs
        self.said["first_step"] = trainer.train_step(batches, step=0, version=0)
        self.write_tensors("sft_gradients", self.gradients(trainer))

    def grpo_step(self) -> None:
        """One step on saved rollouts: the policy is another set of weights than the reference."""
        config = self.config(algorithm="grpo", distributed_optimizer=False, optimizer={"clip_grad": 0.0})
        groups = load_groups(self.job["groups"])
        trainer = self.trainer(config)
        trainer.weights.load(self.job["policy"])
        advantages = [value for group in groups for value in group_advantages(config.algorithm, group)]
        batches = self.shard([t for group in groups for t in group.trajectories], advantages)
        self.said["gap"] = trainer.measure_gap(batches, version=VERSION)
        self.said["mismatch"] = trainer.measure_gap(batches, version=VERSION, mismatch=True)
        self.said["grpo_step"] = trainer.train_step(batches, step=0, version=VERSION)
        self.said["trained_tokens"] = trained = []
        for found, batch in zip(*(trainer.trained_tokens() or [[]]), batches, strict=False):
            measured = (batch.weight > 0) & (batch.versions == VERSION)
            gap = np.abs(found["logprobs"] - batch.rollout_logprobs)[measured]
            trained.append(
                [float(gap.max(initial=0)), float(gap.astype(float).sum()), int(found["other_experts"][measured].sum())]
            )
        self.said["told_again"] = trainer.trained_tokens()
        self.write_tensors("grpo_gradients", self.gradients(trainer))

    def supervised(self) -> Any:
        """Ten optimizer steps with the distributed optimizer; the last two are the updates of one step of the loop."""
        trainer = self.trainer(self.config(algorithm="sft", optimizer=OPTIMIZER))
        *single, before, last = (self.demonstrated(s) for s in range(STEPS))
        self.said["steps"] = [trainer.train_step(batches, step=s, version=0) for s, batches in enumerate(single)]
        self.said["steps"].append(trainer.train_updates([before, last], step=(STEPS - 2) // 2, version=0))
        self.write_tensors("weights", trainer.weights.parameters)
        return trainer

    def next_steps(self, trainer: Any) -> list[dict[str, float]]:
        """The eleventh and twelfth: the second shows the optimizer's state. With what the random state gives."""
        import torch

        draw = {"random": float(torch.rand(()))}
        return [trainer.train_step(self.demonstrated(s), step=s, version=0) | draw for s in (STEPS, STEPS + 1)]

    def checkpoint(self, trainer: Any) -> None:
        """Save, go on, come back, go on again."""
        path = Path(self.job["checkpoint"])
        begin_save(trainer, path, step=STEPS)
        self.said["after_save"] = self.next_steps(trainer)  # while the files are written
        finish_save(trainer, path)
        trainer.restore(str(path), same_layout=True)
        self.said["after_restore"] = self.next_steps(trainer)

    def restore_from_other_layouts(self, trainer: Any, paths: Iterable[str]) -> None:
        for path in paths:
            name = f"after_restore_of_{Path(path).parent.name}"
            try:
                trainer.restore(path, same_layout=False)
            except BaseException as error:
                self.said[name] = told(error)
            else:
                self.said[name] = self.next_steps(trainer)

    def restore_damaged(self, trainer: Any) -> None:
        """One file of the checkpoint lost its second half."""
        path = self.out / "damaged"
        if self.rank == 0:
            shutil.copytree(self.job["checkpoint"], path)
            files = sorted(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
            os.truncate(files[-1], files[-1].stat().st_size // 2)
        self.barrier()
        try:
            trainer.restore(str(path), same_layout=True)
        except BaseException as error:  # whatever it is, the other tests of this layout need the rest
            self.said["damaged"] = told(error)

    def finish(self) -> None:
        from megatron.core import parallel_state

        self.said["place"] = {
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "data": parallel_state.get_data_parallel_rank(),
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
            "expert": parallel_state.get_expert_model_parallel_rank(),
            "expert_data": parallel_state.get_expert_data_parallel_rank(),
            "context": parallel_state.get_context_parallel_rank(),
        }
        (self.out / f"{self.rank}.json").write_text(json.dumps(self.said))
        np.savez(self.out / f"{self.rank}.npz", **self.arrays)
        rank_start.leave(self.parallel)


def main() -> None:
    rank = Rank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.first_step()
    rank.grpo_step()
    trainer = rank.supervised()
    rank.checkpoint(trainer)
    rank.restore_from_other_layouts(trainer, rank.job["restore"])
    rank.restore_damaged(trainer)
    rank.finish()


if __name__ == "__main__":
    main()
