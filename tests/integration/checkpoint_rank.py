"""One gloo rank of test_checkpoints: real trainers under one layout after the other, in one start.

    python -m tests.integration.checkpoint_rank JOB.json RANK

It writes RANK.json: by layout, what trainers saved, restored and said.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.trainer.checkpoint import files
from tests.integration import rank_start
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import demonstrations, microbatch_tokens
from tests.refusals import told

HELD_S = 300.0
"""Seconds after which the thread of a save that nobody lets go writes all the same."""


class Rank:
    def __init__(self, job: dict[str, Any], rank: int):
        self.job, self.rank, self.out = job, rank, Path(job["out"])
        self.said: dict[str, Any] = {}

    def enter(self, name: str) -> None:
        """Join the other rank under layout `name`."""
        from slimx.models.families import read_model

        where = f"tcp://127.0.0.1:{self.job['ports'][name]}"
        self.name, self.spec = name, read_model(self.job["model"])
        self.parallel = rank_start.enter(self.config(name).trainer, self.rank, where)
        self.sizes = self.parallel.sizes

    def config(self, name: str, load: str | None = None) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": {"path": self.job["model"]},
                "numerics": {"dtype": "bfloat16" if "bf16" in name else "float32"},
                "trainer": {**self.job["layouts"][name], "load": load, "optimizer": {"lr": 2e-3}},
                "rollout": {"prompts": "p", "engines": []},
                "algorithm": {"name": "sft"},
                "checkpoint": {"deadline": 300},
            }
        )

    def trainer(self, load: str | None = None) -> Any:
        from slimx.trainer.trainer import PolicyTrainer

        return PolicyTrainer(self.config(self.name, load), self.spec, self.parallel)

    def batches(self, step: int) -> list[MicroBatch]:
        sizes, trajectories = self.sizes, demonstrations(step)
        rows = make_rows(trajectories, [1.0] * len(trajectories), loss_weights(trajectories, "token"))
        batch = pack(
            rows,
            data_size=sizes.data,
            max_tokens=microbatch_tokens(rows, sizes.data),
            multiple_of=sizes.tensor * sizes.context,
            sequence_multiple=2 * sizes.context,
        )
        return batch.shards[self.parallel.coordinates.data]

    def steps(self, trainer: Any, first: int, count: int) -> list[dict[str, float]]:
        return [trainer.train_step(self.batches(s), step=s, version=0) for s in range(first, first + count)]

    def tell(self, key: str, work: Callable[[], Any]) -> None:
        """Keep what `work` returns, or code and object of the refusal that it raises."""
        try:
            value = work()
        except Exception as error:
            value = told(error)
        self.said.setdefault(self.name, {})[key] = value

    def leave(self) -> None:
        rank_start.leave(self.parallel)

    # What is asked ----------------------------------------------------------------------------------------------------

    def save_while_training(self, trainer: Any, path: Path) -> dict[str, Any]:
        """Two more steps while the thread still holds its copy; then back, and the same two steps again."""
        saver, trained = trainer.saver, threading.Event()
        write, saver._write = saver._write, lambda *work: (trained.wait(HELD_S), write(*work))
        begin_save(trainer, path, step=2)
        saver._write = write
        while_writing = self.steps(trainer, 2, 2)
        early = files.unreported(path, range(self.sizes.world))
        self.parallel.host_group.barrier().wait()  # both have looked
        trained.set()
        finish_save(trainer, path)
        trainer.restore(str(path), same_layout=True)
        return {"while_writing": while_writing, "early": early, "restored": self.steps(trainer, 2, 2)}

    def save_again(self, trainer: Any, path: Path) -> dict[str, Any]:
        """The plan of the first save serves the second one, of other values."""
        plan, steps = trainer.saver._metadata, self.steps(trainer, 4, 1)
        begin_save(trainer, path, step=5)
        finish_save(trainer, path)
        expected = self.steps(trainer, 5, 1)
        trainer.restore(str(path), same_layout=True)
        kept = trainer.saver._metadata is plan
        return {"kept": kept, "before": steps, "expected": expected, "restored": self.steps(trainer, 5, 1)}

    def save_badly(self, trainer: Any, path: Path) -> None:
        """Something stands where rank 1 wants to write."""
        if self.rank == 0:
            (path / "__1_0.distcp").mkdir(parents=True)
        begin_save(trainer, path, step=5)
        finish_save(trainer, path)

    def resume(self, path: Path, *, load_optimizer: bool = True) -> list[dict[str, float]]:
        """Steps of a new trainer that was brought to the checkpoint of another layout."""
        trainer = self.trainer()
        trainer.restore(str(path), same_layout=False, load_optimizer=load_optimizer)
        return self.steps(trainer, 2, 2)

    def mirror(self, trainer: Any) -> dict[str, Any]:
        """Two steps of `trainer`, and of a new one that began from its bytes."""
        from slimx.extras.recovery.mirror import Mirror, read_back
        from slimx.trainer.checkpoint.load import take_state
        from slimx.trainer.checkpoint.state import local_state

        state = local_state(trainer.chunks, trainer.optimizer, loading=False, frozen=False)
        data = Mirror(self.rank, 60).copied(state)
        expected, new = self.steps(trainer, 6, 2), self.trainer()
        empty = local_state(new.chunks, new.optimizer, loading=True, frozen=False)
        take_state(read_back(data, empty), new.chunks, new.optimizer)
        new.weights.changed()
        return {"expected": expected, "restored": self.steps(new, 6, 2)}

    def same_weights(self, path: str) -> bool:
        """Returns True if Megatron-LM's directory gives this rank the bits that the Hugging Face one gives it."""
        import torch

        found, wanted = self.trainer(path).weights.parameters, self.trainer().weights.parameters
        return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def main() -> None:
    rank = Rank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank_start.prepare()
    first = rank.out / "DP2"
    for name in rank.job["layouts"]:
        rank.enter(name)
        if name in ("DP2", "EP2-bf16"):
            trainer = rank.trainer()
            rank.tell("steps", lambda trainer=trainer: rank.steps(trainer, 0, 2))
            path = rank.out / name
            rank.tell("saved", lambda trainer=trainer, path=path: rank.save_while_training(trainer, path))
        else:
            trainer = rank.trainer()
            rank.steps(trainer, 0, 2)
        if name == "DP2":
            rank.tell("saved_again", lambda trainer=trainer: rank.save_again(trainer, rank.out / "second"))
            rank.tell("saved_badly", lambda trainer=trainer: rank.save_badly(trainer, rank.out / "bad"))
        elif name == "EP2-bf16":
            rank.tell("refused", lambda: rank.resume(first))
            rank.tell("weights_only", lambda: rank.resume(first, load_optimizer=False))
        else:
            rank.tell("resumed", lambda: rank.resume(first))
        rank.tell("mirrored", lambda trainer=trainer: rank.mirror(trainer))
        for kind, path in rank.job["megatron"].items():
            rank.tell(kind, lambda path=path: rank.same_weights(path))
        rank.leave()
    (rank.out / f"{rank.rank}.json").write_text(json.dumps(rank.said))


if __name__ == "__main__":
    main()
