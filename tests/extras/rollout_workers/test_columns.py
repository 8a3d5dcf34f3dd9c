"""Columns in Ray's object store: ranks load them, and a loss is reported with its trajectory."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainBatch, micro_batches
from slimx.data.packing import fetch_rows, pack
from slimx.data.records import Group
from slimx.data.saved.codec import encode
from slimx.data.stored import summarize
from slimx.extras.rollout_workers.columns import ReportStore
from slimx.orchestration.batches import make_update_rows
from tests.refusals import refused
from tests.unit.data import stored_stand
from tests.unit.data.stored_stand import full_group

pytestmark = pytest.mark.usefixtures("cluster")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import tests
cloudpickle.register_pickle_by_value(stored_stand)
RUN = {"run": {"dir": "none"}, "model": {"path": "none"}, "rollout": {"prompts": "none"}}


class Maker:
    """Process that generates groups."""

    def report(self, group: Group) -> tuple[Group, list[np.ndarray]]:
        """Returns the summary of `group` and the object that accompanies it."""
        store, columns = ReportStore(), []
        summary = summarize(group, store.store)
        store.move_to(columns)
        return summary, columns

    def put(self, group: Group) -> tuple[Group, list[ray.ObjectRef]]:
        """Returns the summary and a reference to an object that this process owns."""
        summary, columns = self.report(group)
        return summary, [ray.put(columns)]


class Rank:
    """Process that trains on micro-batches."""

    def laid_out(self, shard: Sequence[MicroBatch]) -> bytes:
        batches = list(micro_batches(shard))
        fetch_rows(batches)
        return _bytes(batches)


def _bytes(batches: Sequence[MicroBatch]) -> bytes:
    return encode([{item.name: getattr(batch, item.name) for item in fields(batch)} for batch in batches])


@pytest.fixture
def maker() -> Any:
    return ray.remote(Maker).options(num_cpus=0).remote()


@pytest.fixture(scope="module")
def rank() -> Any:
    return ray.remote(Rank).options(num_cpus=0).remote()


def reported(maker: Any, group: Group) -> Group:
    """Returns the summary of a group whose columns this process owns."""
    summary, columns = maker.report.options(num_returns=2).remote(group)
    return referring(ray.get(summary), columns)


def kept_by_maker(maker: Any, group: Group) -> Group:
    """Returns the summary of a group whose columns the maker owns."""
    summary, (columns,) = ray.get(maker.put.remote(group))
    return referring(summary, columns)


def referring(group: Group, columns: ray.ObjectRef) -> Group:
    for trajectory in group.trajectories:
        trajectory.columns.reference = columns
    return group


def batch_of(groups: list[Group]) -> TrainBatch:
    settings = Config.model_validate(RUN)
    (rows,) = make_update_rows(settings, groups, partial(all_advantages, settings.algorithm))
    return pack(rows, data_size=2, max_tokens=100, multiple_of=8)


@pytest.mark.parametrize("routes", [False, True])
def test_ranks_lay_out_what_another_process_stored(maker: Any, rank: Any, routes: bool) -> None:
    plain = [full_group(number, routes=routes) for number in range(3)]
    for groups in (plain, [reported(maker, group) for group in plain]):
        for shard, expected in zip(batch_of(groups).shards, batch_of(plain).shards, strict=True):
            assert ray.get(rank.laid_out.remote(ray.put(shard))) == _bytes(expected)


def test_reported_columns_outlive_their_process_and_lost_ones_are_named(maker: Any, rank: Any) -> None:
    kept, lost = reported(maker, full_group(1)), kept_by_maker(maker, full_group(2))
    ray.kill(maker)
    ends = time.monotonic() + 60
    with pytest.raises(ray.exceptions.RayError):
        while time.monotonic() < ends:  # until Ray has freed what its owner kept
            ray.get(lost.trajectories[0].columns.reference)
            time.sleep(0.2)
    batches = list(micro_batches(batch_of([kept, lost]).shards))
    fetch_rows(batches)
    assert encode(kept) == encode(full_group(1))
    with refused("data.lost", about="g2/3"):
        _ = lost.trajectories[3].token_ids
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(rank.laid_out.remote(ray.put(batches)), timeout=60)
    assert caught.value.cause.code == "data.lost" and caught.value.cause.about.startswith("g2/")
