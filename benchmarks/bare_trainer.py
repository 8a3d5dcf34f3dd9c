"""slimx's trainer rank and a bare megatron-core loop in the same process, for benchmarks/loop.py."""

from __future__ import annotations

from typing import Any

from slimx.trainer.worker import TrainerWorker


class BareTrainerWorker(TrainerWorker):
    """A trainer worker whose bare loop has a separate model and optimizer, with the initial weights of the run."""

    def start(self, init_method: str) -> dict[str, Any]:
        started = super().start(init_method)
        from bare_megatron import BareMegatron

        from slimx.models.families import read_model

        model = self.rank.roles["model"]
        self._bare = BareMegatron(model.config, read_model(model.config.model.path), model.parallel)
        return started

    def hold(self, batches: Any) -> None:
        """Stores a data-parallel rank's micro-batches for `bare_step`."""
        self._bare.hold(batches)

    def bare_step(self) -> float:
        """Runs forward, backward and optimizer step on the stored micro-batches; returns the gradient norm."""
        return self._bare.step()
