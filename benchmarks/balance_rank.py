"""The trainer ranks of benchmarks/balance.py: slimx's Trainer in two processes."""

from __future__ import annotations

import os
import time
import warnings

from slimx.data.batch import MicroBatch

LAYOUTS = {"DP2": {"world_size": 2}, "EP2": {"world_size": 2, "expert": 2}}
"""Layout -> keys of `trainer`."""


class TrainerRank:
    """One rank of a supervised run of the model in `model`, which never learns anything."""

    def __init__(self, rank: int, layout: str, model: str, init_method: str):
        # gloo would look up the host's name, which need not resolve; gloo's own variable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from slimx.trainer.worker import install_adapters

        warnings.simplefilter("ignore")  # megatron-core's, of what is absent without a GPU
        install_adapters()  # before anything imports megatron-core
        import torch

        from slimx.config.schema import Config
        from slimx.layout.ranks import sizes_of
        from slimx.models.families import read_model
        from slimx.trainer.parallel import ParallelState
        from slimx.trainer.trainer import Trainer

        torch.set_num_threads(1)
        config = Config.model_validate(
            {
                "run": {"dir": model},
                "model": {"path": model},
                "numerics": {"dtype": "float32"},
                # The weights stay as they are: every step of the same rows is the same work.
                "trainer": {**LAYOUTS[layout], "optimizer": {"lr": 1e-10}},
                "rollout": {"prompts": "none", "engines": []},
                "algorithm": {"name": "sft"},
            }
        )
        self.parallel = ParallelState(
            sizes_of(config.trainer),
            rank=rank,
            init_method=init_method,
            device=torch.device("cpu"),
            deadline_s=60,
            seed=1,
        )
        self.trainer = Trainer(config, read_model(model), self.parallel)

    def step(self, batches: list[MicroBatch]) -> tuple[float, float]:
        """Seconds of one training step from the moment when both ranks are ready for it, and of this rank's CPU."""
        self.parallel.host_group.barrier().wait()
        began, busy = time.perf_counter(), time.process_time()
        self.trainer.train_step(batches, step=0, version=0)
        return time.perf_counter() - began, time.process_time() - busy

    def stop(self) -> None:
        self.parallel.destroy()
