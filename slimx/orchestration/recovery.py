"""Handling of lost trainer ranks: by default the run ends; an extra may replace the ranks during the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from slimx import entry_points
from slimx.data.batch import TrainBatch
from slimx.errors import SlimxError
from slimx.layout.ranks import Sizes
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.ranks.watch import watch_ranks
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.recording import Records
from slimx.reshard.plan.copy_plan import Plan

Replan = Callable[[Sizes], Mapping[str, Plan]]
"""Function that returns the export and publication plans for trainer ranks that restart with other parallel sizes."""


class RankLossHandler:
    """Handles the loss of a rank of `trainers`. This base class ends the run; its subclasses replace lost ranks."""

    def __init__(self, trainers: TrainerGroup):
        self.trainers = trainers
        self.on_replaced: Callable[[], None] = lambda: None
        """Function that is called when new ranks have replaced lost ones, before any call to the new ranks."""

    async def watch(self) -> SlimxError:
        """Watches the ranks, and returns the error that ends the run when a loss cannot be handled."""
        return await watch_ranks(self.trainers, self.trainers.config.trainer.watch_deadline)

    async def open(self, checkpoints: Checkpointer, step: int, checkpoint: Path | None, *, same_layout: bool) -> None:
        """Enables the replacement of lost ranks from now on. The running ranks have the state after `step` steps,
        loaded from `checkpoint`, or the initial weights if `checkpoint` is None. `checkpoints` will write later states.
        `same_layout`: True if `checkpoint` was written with the current parallel sizes."""

    def trained(self, step: int, version: int, updates: list[TrainBatch], metrics: dict[str, float]) -> None:
        """Records a training step, so that new ranks can repeat it. `step`: number of steps completed before this one.
        `version`: version of the engines' weights during the step. `metrics`: metrics of the step."""

    async def with_retry[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Awaits `work`, which calls trainer ranks, and returns its result. If ranks are lost and replaced during the
        call, calls `work` again."""
        return await work()

    async def after_step(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Does the handler's periodic work after `step` completed steps, such as mirroring states. `phase`: function
        that returns a context manager, which marks a named phase of the step in the timeline."""

    def bases(self) -> set[int]:
        """Returns the steps whose saved states new ranks may start from. The reference models that belong to these
        steps must not be deleted."""
        return set()

    def metrics(self) -> dict[str, float]:
        """Returns a step's metrics about the replacement of lost ranks."""
        return {}

    async def stop(self) -> None:
        """Stops helper processes that store copies of the trainers' state for replacement ranks. Does not raise."""


def make_recovery(trainers: TrainerGroup, records: Records, log_dir: Path, replan: Replan) -> RankLossHandler:
    """Creates the handler for rank losses: the first handler that an entry point of `slimx.recoveries` returns for this
    configuration, else a handler that ends the run. `replan`: function that returns the plans for new ranks with other
    parallel sizes."""
    for maker in entry_points.load_all("slimx.recoveries").values():
        recovery = maker(trainers, records, log_dir, replan)
        if recovery is not None:
            return recovery
    return RankLossHandler(trainers)
