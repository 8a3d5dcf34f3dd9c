"""Columns in Ray's object store: ranks load them, and a loss is reported with its trajectory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import cloudpickle
import pytest
import ray

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.cluster.columns import RayColumns
from slimx.cluster.connection import start_ray, stop_ray
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainBatch, micro_batches
from slimx.data.packing import fetch_rows, pack
from slimx.data.records import Group
from slimx.data.saved.codec import encode
from slimx.data.stored import summarize
from slimx.orchestration.batches import make_update_rows
from tests.refusals import refused
from tests.unit.data import stored_stand
from tests.unit.data.stored_stand import full_group

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import tests
RUN = {"run": {"dir": "none"}, "model": {"path": "none"}, "rollout": {"prompts": "none"}}


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[None]:
    engines = {"rollout": {"prompts": "none", "engines": []}, "algorithm": {"name": "sft"}}
    start_ray(Config.model_validate(RUN | engines | {"cluster": {"device": "cpu"}}), "cpu")
    try:
        yield
    finally:
        stop_ray()


class Maker:
    """Process that generates groups."""

    def put(self, group: Group) -> Group:
        """Keeps the columns itself."""
        return summarize(group, RayColumns.store)

    def give(self, group: Group) -> tuple[Group, Group]:
        """Gives the columns to the caller, as the second value."""
        return summarize(group, lambda part: None), group


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


def given(maker: Any, group: Group) -> Group:
    summary, columns = maker.give.options(num_returns=2).remote(group)
    out = ray.get(summary)
    for trajectory in out.trajectories:
        trajectory.columns = RayColumns(columns)
    return out


def batch_of(groups: list[Group]) -> TrainBatch:
    settings = Config.model_validate(RUN)
    (rows,) = make_update_rows(settings, groups, partial(all_advantages, settings.algorithm))
    return pack(rows, data_size=2, max_tokens=100, multiple_of=8)


def test_ranks_lay_out_what_another_process_stored(maker: Any, rank: Any) -> None:
    for routes in (False, True):
        plain = [full_group(number, routes=routes) for number in range(3)]
        stored = [ray.get(maker.put.remote(group)) for group in plain]
        for groups in (stored, plain, *([] if routes else [[given(maker, group) for group in plain]])):
            for shard, expected in zip(batch_of(groups).shards, batch_of(plain).shards, strict=True):
                assert ray.get(rank.laid_out.remote(ray.put(shard))) == _bytes(expected)


def test_lost_columns_are_reported_and_those_given_away_are_kept(maker: Any, rank: Any) -> None:
    kept, lost = given(maker, full_group(1)), ray.get(maker.put.remote(full_group(2)))
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


cloudpickle.register_pickle_by_value(stored_stand)
