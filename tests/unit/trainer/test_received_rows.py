"""A rank loads all columns of a call before the call's operation runs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from slimx.data.batch import MicroBatch, make_rows, micro_batches
from slimx.data.packing import pack
from slimx.data.stored import summarize
from slimx.orchestration.batches import trajectories_of
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank
from slimx.trainer.trainer import PolicyTrainer
from tests.unit.data.stored_stand import HeldColumns, full_group


class Policy(PolicyTrainer):
    """Policy without a model, whose operation returns the tokens of its micro-batches."""

    def __init__(self, seen: list[list[MicroBatch]]):
        self.routing = SimpleNamespace(receive=seen.append)

    @operation()
    def tokens(self, updates: list[list[MicroBatch]], *, step: int) -> list[int]:
        return [int(batch.tokens.sum()) for update in updates for batch in update]


def test_a_call_loads_the_columns_of_all_its_updates_at_once():
    seen: list[list[MicroBatch]] = []
    rank: Any = object.__new__(TrainerRank)
    rank.roles, rank.guard, rank._memory = {"model": Policy(seen)}, None, SimpleNamespace(phase=nullcontext)
    groups = [full_group(number) for number in range(4)]
    handles: list[HeldColumns] = []

    def store(group: Any) -> HeldColumns:
        handles.append(HeldColumns(group))
        return handles[-1]

    updates = []
    for part in (groups[:2], groups[2:]):
        trajectories = trajectories_of([summarize(group, store) for group in part])
        rows = make_rows(trajectories, [0.0] * len(trajectories), [1.0] * len(trajectories))
        updates += pack(rows, data_size=1, max_tokens=100).shards
    assert sum(handle.loads for handle in handles) == 0
    total = sum(rank.perform("model.tokens", updates, step=0))
    assert total == sum(int(one.token_ids[:-1].sum()) for group in groups for one in group.trajectories)
    assert sum((handle.fetched for handle in handles), []) == [4]
    assert seen == [list(micro_batches(updates))]
