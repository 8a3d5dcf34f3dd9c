"""Loss of trainer ranks during a run: by default it ends the run; an extra may replace the ranks."""

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
"""Returns the plans by which weights leave ranks of other sizes."""


class RankLossHandler:
    """Handler of the loss of a rank of `trainers`: by default the run ends."""

    def __init__(self, trainers: TrainerGroup):
        self.trainers = trainers
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when other ranks have replaced lost ones, before any call to them."""

    async def watch(self) -> SlimxError:
        """Watches the ranks; returns why the run ends."""
        return await watch_ranks(self.trainers, self.trainers.config.trainer.watch_deadline)

    async def open(self, checkpoints: Checkpointer, step: int, checkpoint: Path | None, *, same_layout: bool) -> None:
        """Starts to replace lost ranks. The running ones are in the state after `step` steps from `checkpoint`, or from
        the initial weights if None; `checkpoints` writes later ones. `same_layout`: `checkpoint` has the current sizes.
        """

    def trained(self, step: int, version: int, updates: list[TrainBatch], metrics: dict[str, float]) -> None:
        """Records a step, counted from 0, that was trained while engines had `version`."""

    async def lasting[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `work`, which calls trainers; repeats it if ranks are lost and replaced."""
        return await work()

    async def after_step(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Runs recurring work after `step` steps, in a `phase`."""

    def bases(self) -> set[int]:
        """Returns the steps whose states new ranks may start from."""
        return set()

    def metrics(self) -> dict[str, float]:
        """Returns metrics of a step about replacements."""
        return {}

    async def stop(self) -> None:
        """Ends processes that keep states; does not raise."""


def make_recovery(trainers: TrainerGroup, records: Records, log_dir: Path, replan: Replan) -> RankLossHandler:
    """Returns the configured recovery: the first that an entry point of `slimx.recoveries` creates."""
    for maker in entry_points.load_all("slimx.recoveries").values():
        recovery = maker(trainers, records, log_dir, replan)
        if recovery is not None:
            return recovery
    return RankLossHandler(trainers)
