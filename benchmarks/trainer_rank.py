"""The trainer ranks of benchmarks/trainer.py: slimx's Trainer and a bare megatron-core loop in the same process."""

from __future__ import annotations

import time
from typing import Any

from gloo_rank import join

from slimx.data.batch import MicroBatch

VERSION = 1


class TrainerRank:
    """One rank. With lr 1e-10 the weights hardly change, so every step of both sides is the same work."""

    def __init__(self, rank: int, layout: dict[str, Any], model: str, init_method: str):
        config, spec, self.parallel = join(
            {
                "run": {"dir": model},
                "model": {"path": model},
                "numerics": {"dtype": "float32"},
                "trainer": {**layout, "optimizer": {"lr": 1e-10}},
                "rollout": {"prompts": "none"},
                "algorithm": {"name": "grpo"},
            },
            rank,
            init_method,
        )
        from bare_megatron import BareMegatron

        from slimx.trainer.trainer import PolicyTrainer

        self.trainer = PolicyTrainer(config, spec, self.parallel)
        self.bare = BareMegatron(config, spec, self.parallel)

    def hold(self, batches: list[MicroBatch]) -> None:
        """Stores the micro-batches of the following steps."""
        self.batches = batches
        self.bare.hold(batches)

    def slimx_step(self) -> tuple[float, float, float]:
        """Takes a step of slimx. Returns its seconds, from the moment when all ranks are ready, the CPU seconds of this
        rank, and the gradient norm."""
        began, cpu = self._together()
        metrics = self.trainer.train_step(self.batches, step=0, version=VERSION)
        return time.perf_counter() - began, time.process_time() - cpu, metrics["optim/grad_norm"]

    def bare_step(self) -> tuple[float, float, float]:
        """Takes a step of the bare loop. Returns the same figures as `slimx_step`."""
        began, cpu = self._together()
        norm = self.bare.step()
        return time.perf_counter() - began, time.process_time() - cpu, norm

    def _together(self) -> tuple[float, float]:
        self.parallel.host_group.barrier().wait()
        return time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.parallel.destroy()
