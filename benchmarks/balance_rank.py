"""The trainer ranks of benchmarks/balance.py: slimx's Trainer in two processes."""

from __future__ import annotations

import time

from gloo_rank import join

from slimx.data.batch import MicroBatch

LAYOUTS = {"DP2": {"world_size": 2}, "EP2": {"world_size": 2, "expert": 2}}
"""Layout -> keys of `trainer`."""


class TrainerRank:
    """One rank of a supervised run of the model in `model`, whose weights never change."""

    def __init__(self, rank: int, layout: str, model: str, init_method: str):
        config, spec, self.parallel = join(
            {
                "run": {"dir": model},
                "model": {"path": model},
                "numerics": {"dtype": "float32"},
                # The weights stay as they are: every step of the same rows is the same work.
                "trainer": {**LAYOUTS[layout], "optimizer": {"lr": 1e-10}},
                "rollout": {"prompts": "none", "engines": []},
                "algorithm": {"name": "sft"},
            },
            rank,
            init_method,
        )
        from slimx.trainer.trainer import PolicyTrainer

        self.trainer = PolicyTrainer(config, spec, self.parallel)

    def step(self, batches: list[MicroBatch]) -> tuple[float, float]:
        """Takes one training step. Returns its seconds, from the moment when both ranks are ready, and this rank's CPU
        seconds."""
        for batch in batches:
            _ = batch.tokens  # laid out before the clock starts
        self.parallel.host_group.barrier().wait()
        began, busy = time.perf_counter(), time.process_time()
        self.trainer.train_step(batches, step=0, version=0)
        return time.perf_counter() - began, time.process_time() - busy

    def stop(self) -> None:
        self.parallel.destroy()
