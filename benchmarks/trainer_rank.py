"""The trainer ranks of benchmarks/trainer.py: slimx's Trainer and a bare megatron-core loop in the same process."""

from __future__ import annotations

import time
from typing import Any

from gloo_rank import join

from slimx.data.batch import MicroBatch

VERSION = 1


class TrainerRank:
    """One rank. The weights stay as they are (lr 1e-10): every step of both is the same work."""

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
        """Take the micro-batches of the steps that follow."""
        self.batches = batches
        self.bare.hold(batches)

    def slimx_step(self) -> tuple[float, float, float]:
        """Seconds of a step of slimx from the moment when all ranks are ready for it, CPU seconds of this rank, and the
        gradient norm."""
        began, cpu = self._together()
        metrics = self.trainer.train_step(self.batches, step=0, version=VERSION)
        return time.perf_counter() - began, time.process_time() - cpu, metrics["optim/grad_norm"]

    def bare_step(self) -> tuple[float, float, float]:
        """The same of the bare loop."""
        began, cpu = self._together()
        norm = self.bare.step()
        return time.perf_counter() - began, time.process_time() - cpu, norm

    def _together(self) -> tuple[float, float]:
        self.parallel.host_group.barrier().wait()
        return time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.parallel.destroy()
