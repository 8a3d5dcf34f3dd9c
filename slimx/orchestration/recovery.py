"""Loss of trainers while a run goes on: by itself it ends the run; an extra may replace them."""

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
"""Gives the plans by which weights leave ranks of other sizes."""


class Recovery:
    """The answer of a run to the loss of a rank of `trainers`: it ends."""

    def __init__(self, trainers: TrainerGroup):
        self.trainers = trainers
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when other ranks have taken the place of lost ones, before any call to them."""

    async def watch(self) -> SlimxError:
        """Watch the ranks; returns why the run ends."""
        return await watch_ranks(self.trainers, self.trainers.config.trainer.watch_deadline)

    async def open(self, checkpoints: Checkpointer, step: int, checkpoint: Path | None, *, same_layout: bool) -> None:
        """Replace lost ranks from now on. Those that run have done `step` steps, from `checkpoint` or, with None, from
        the initial weights; `checkpoints` writes the next ones. `same_layout`: `checkpoint` is of the present sizes."""

    def trained(self, step: int, version: int, updates: list[TrainBatch], metrics: dict[str, float]) -> None:
        """Take note of a step, the first being 0, that was trained while engines had `version`."""

    async def lasting[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which calls trainers; done again from its beginning if they are lost and replaced."""
        return await work()

    async def after_step(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Do what is due after `step` steps, in a `phase`."""

    def bases(self) -> set[int]:
        """Steps whose states new ranks may begin from."""
        return set()

    def metrics(self) -> dict[str, float]:
        """Metrics of a step about replacements."""
        return {}

    async def stop(self) -> None:
        """End processes that keep states; does not raise."""


def make_recovery(trainers: TrainerGroup, records: Records, log_dir: Path, replan: Replan) -> Recovery:
    """The configured recovery: that of the first entry point of `slimx.recoveries` that has one."""
    makers = entry_points.load_all("slimx.recoveries").values()
    made = (maker(trainers, records, log_dir, replan) for maker in makers)
    return next((recovery for recovery in made if recovery is not None), Recovery(trainers))
