"""slimx's trainer rank with a bare megatron-core loop beside it, for benchmarks/loop.py."""

from __future__ import annotations

from typing import Any

from slimx.trainer.worker import TrainerWorker


class BareTrainerWorker(TrainerWorker):
    """The bare loop has a model and an optimizer of its own, with the weights that the run starts from."""

    def start(self, init_method: str) -> dict[str, Any]:
        started = super().start(init_method)
        from bare_megatron import BareMegatron

        from slimx.models.families import read_model

        model = self.rank.roles["model"]
        self._bare = BareMegatron(model.config, read_model(model.config.model.path), model.parallel)
        return started

    def hold(self, batches: Any) -> None:
        """Keep a data-parallel rank's micro-batches for `bare_step`."""
        self._bare.hold(batches)

    def bare_step(self) -> float:
        """Forward, backward and optimizer step on what is held; the gradient norm."""
        return self._bare.step()
