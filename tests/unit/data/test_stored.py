"""A trajectory whose columns are stored elsewhere is the same trajectory, and the driver's work reads no column."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from slimx.algorithms.advantages.estimate import StepData, all_advantages, finish_advantages
from slimx.algorithms.credit import credited
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainBatch, make_rows, micro_batches
from slimx.data.lazy import set_fields
from slimx.data.loss_weights import trained_weights
from slimx.data.packing import fetch_rows, pack
from slimx.data.records import Group, Span, Trajectory
from slimx.data.saved.codec import decode, encode, encode_groups
from slimx.data.saved.step_files import describe
from slimx.data.saved.trained_tokens import TrainedTokens
from slimx.data.stored import COUNTS, STORED, StoredTrajectory, summarize
from slimx.orchestration.batches import batch_metrics, make_update_rows, trajectories_of
from slimx.orchestration.policies import of_policy
from slimx.orchestration.ranks.critic import _bare
from slimx.orchestration.state.saves import RunState
from slimx.orchestration.step.measure import batch_counts, staleness_metrics, trajectory_metrics
from slimx.rollout.flow.tickets import Batch, SavedTicket, older_trajectory, rewards_of
from tests.refusals import refused
from tests.unit.data.stored_stand import HeldColumns, LostColumns, full_group


def config(**algorithm: Any) -> Config:
    engines = [{"count": 1}, {"name": "wise", "frozen": True, "model": "w"}]
    return Config.model_validate(
        {
            "run": {"dir": "r"},
            "model": {"path": "m"},
            "rollout": {"prompts": "p", "engines": engines if "teacher_engine" in algorithm else engines[:1]},
            "schedule": {"max_staleness": int("mask_stale_tokens" in algorithm)},
            "algorithm": algorithm,
        }
    )


def equal(one: object, other: object) -> bool:
    """Returns True if two values, which may contain arrays, are equal bit for bit."""
    return type(one) is type(other) and encode(one) == encode(other)


def arrays(batch: MicroBatch) -> dict[str, Any]:
    return {item.name: getattr(batch, item.name) for item in fields(batch)}


def packed(groups: list[Group], settings: Config, data_size: int = 2) -> TrainBatch:
    (rows,) = make_update_rows(settings, groups, partial(all_advantages, settings.algorithm))
    return pack(rows, data_size=data_size, max_tokens=100, multiple_of=8, sequence_multiple=2)


# The same trajectory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routes", [False, True])
def test_every_field_and_property_is_that_of_the_trajectory(routes):
    group = full_group(1, routes=routes)
    names = [item.name for item in fields(Trajectory)]
    for kept, plain in zip(summarize(group, HeldColumns).trajectories, group.trajectories, strict=True):
        assert isinstance(kept, StoredTrajectory) and not STORED - set(names)
        for name in (*COUNTS, *names):
            assert equal(getattr(kept, name), getattr(plain, name)), name
        assert equal(kept.versions(), plain.versions()) and equal(kept.sampled_ids(), plain.sampled_ids())
        assert equal(kept.newest_only().loss_mask, plain.newest_only().loss_mask)
        assert (kept.newest_only() is kept) == (not plain.mixed)
        assert encode(replace(kept, reward=7.0)) == encode(replace(plain, reward=7.0))
        assert encode(asdict(kept)) == encode(asdict(plain))


def test_the_counts_are_those_of_the_columns():
    for trajectory in full_group(3, 8).trajectories:
        versions = trajectory.versions()
        sampled = [span for span in trajectory.spans if span.source == "sampled"]
        assert trajectory.length == len(trajectory.token_ids)
        assert trajectory.sampled_tokens == len(trajectory.sampled_ids()) == (versions >= 0).sum()
        assert trajectory.trained_tokens == trajectory.loss_mask[1:].sum()
        assert trajectory.turn_count == len({span.turn for span in sampled}) == 2
        assert trajectory.oldest_version == versions[versions >= 0].min()
        assert trajectory.mixed == (len(set(versions[versions >= 0])) > 1)


def test_a_saved_group_is_that_of_its_trajectories():
    group = full_group(2, routes=True)
    stored = summarize(group, HeldColumns)
    assert encode(stored) == encode(group)
    assert type(decode(Group, encode(stored)).trajectories[0]) is Trajectory


@pytest.mark.parametrize("duplicate", [copy.copy, lambda item: pickle.loads(pickle.dumps(item))])
def test_a_copy_has_the_handle_and_the_changes_but_no_columns(duplicate):
    (kept, *_) = summarize(full_group(1, 2), HeldColumns).trajectories
    assert len(kept.token_ids)
    kept.reward, kept.loss_mask = 5.0, np.zeros(kept.length, np.uint8)
    other = duplicate(kept)
    assert (other.reward, other.length, other.metadata) == (5.0, kept.length, kept.metadata)
    assert "token_ids" not in other.names and not other.loss_mask.any()
    loads = other.columns.loads
    assert equal(other.token_ids, kept.token_ids) and other.columns.loads == loads + 1


def test_a_field_without_a_value_is_read_without_a_load():
    group = full_group(1, 1)
    group.trajectories[0] = replace(group.trajectories[0], support=None, images=[], turns=[])
    (kept,) = summarize(group, LostColumns).trajectories
    assert (kept.support, kept.routed_experts, kept.images, kept.turns) == (None, None, [], [])
    with pytest.raises(AttributeError):
        _ = kept.unknown


def test_lost_columns_are_reported_with_the_trajectory():
    (kept, *_) = summarize(full_group(4), LostColumns).trajectories
    with refused("data.lost", about="g4/0"):
        _ = kept.token_ids


def test_lost_columns_are_never_encoded():
    group = summarize(full_group(4), LostColumns)
    ticket = SavedTicket(number=0, prompt=group.prompt, group=group)
    state = RunState(step=1, version=1, policies={}, rollouts={"tickets": [ticket]})
    for save in (partial(encode, group), partial(encode, [ticket]), partial(encode_groups, [group]), state.files):
        with refused("data.lost"):
            save()


def test_encoding_leaves_no_columns_behind():
    group = full_group(4, routes=True)
    stored = summarize(group, HeldColumns)
    tickets = [SavedTicket(number=0, prompt=group.prompt, group=one) for one in (stored, group)]
    state = RunState(step=1, version=1, policies={}, rollouts={"tickets": tickets[:1]})
    assert state.files()["slimx/tickets.bin"] == encode(tickets[1:])
    for trajectory in stored.trajectories:
        with pytest.raises(AttributeError):
            object.__getattribute__(trajectory, "computed")


def test_counts_follow_the_columns_that_are_set():
    (kept, *_) = summarize(full_group(4), LostColumns).trajectories
    assert kept.trained_tokens
    kept.loss_mask = np.zeros(kept.length, np.uint8)
    assert kept.trained_tokens == copy.copy(kept).trained_tokens == 0
    kept.spans = [Span(start=0, stop=kept.length, source="sampled", version=7)]
    assert (kept.sampled_tokens, kept.turn_count, kept.oldest_version, kept.mixed) == (kept.length, 1, 7, False)
    kept.token_ids = np.zeros(2, np.int32)
    assert kept.length == 2


def test_all_layers_are_laid_out_without_a_choice_of_layers():
    groups = [full_group(number, routes=True) for number in range(2)]
    for one, other in zip(*(micro_batches(packed(groups, config()).shards) for _ in range(2)), strict=True):
        one.route_layers = None
        assert equal(one.routed_experts, other.routed_experts)


def test_ranks_free_the_rows_that_they_have_laid_out():
    shards = packed([full_group(number, routes=True) for number in range(2)], config()).shards
    for sent, kept in zip(micro_batches(pickle.loads(pickle.dumps(shards))), micro_batches(shards), strict=True):
        sent.route_layers = (1, 2)
        assert sent.routed_experts.shape[1] == 2 and not sent.members
        assert kept.tokens.tolist() == sent.tokens.tolist() and kept.members


def test_trajectories_with_routes_are_stored_one_by_one():
    for routes, sizes in ((False, [3]), (True, [1, 1, 1])):
        parts: list[int] = []

        def store(part: Group, parts: list[int] = parts) -> HeldColumns:
            parts.append(len(part.trajectories))
            return HeldColumns(part)

        stored = summarize(full_group(1, 3, routes=routes), store)
        assert parts == sizes
        assert [one.token_ids.sum() for one in stored.trajectories] == [
            one.token_ids.sum() for one in full_group(1, 3, routes=routes).trajectories
        ]


# A step ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt", "constant"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "opo"])
def test_the_driver_reads_no_column_of_a_step(name, aggregation):
    settings = config(name=name, aggregation=aggregation)
    plain = [full_group(number, routes=number == 1) for number in range(3)]
    groups = [summarize(group, LostColumns) for group in plain]
    assert [older_trajectory(group, 2) for group in groups] == [group.trajectories[0] for group in groups]
    assert rewards_of(groups[0]) == rewards_of(plain[0])
    selected = of_policy(credited(groups, "shared"), "actor")
    batch, expected = packed(selected, settings), packed(of_policy(credited(plain, "shared"), "actor"), settings)
    shards = pickle.loads(pickle.dumps(batch.shards))
    assert batch_metrics([batch]) == batch_metrics([expected])
    assert [[one.lengths for one in shard] for shard in shards] == [
        [one.lengths for one in shard] for shard in expected.shards
    ]
    for measure in (partial(trajectory_metrics, passing=1.0), partial(staleness_metrics, version=3)):
        assert measure(groups) == measure(plain)
    assert batch_counts(Batch(groups)) == batch_counts(Batch(plain))
    assert describe(1, 2, groups, {}, None) == describe(1, 2, plain, {}, None)
    (rows,) = make_update_rows(settings, groups, partial(all_advantages, settings.algorithm))
    (known,) = make_update_rows(settings, plain, partial(all_advantages, settings.algorithm))
    for row, other in zip(rows, known, strict=True):
        marks, logprobs = np.zeros(len(row), bool), np.zeros(len(row))
        values = TrainedTokens.of_row(row, logprobs, marks)
        assert encode(values) == encode(TrainedTokens.of_row(other, logprobs, marks))
        assert row.routed == (row.trajectory.id[:2] == "g1") == (values.other_experts is not None)


@pytest.mark.parametrize("routes", [False, True])
def test_ranks_lay_out_the_micro_batches_of_whole_trajectories(routes):
    groups = [full_group(number, routes=routes) for number in range(4)]
    stored = [summarize(group, HeldColumns) for group in groups]
    here = packed(groups, config())
    for shards in (packed(stored, config()).shards, pickle.loads(pickle.dumps(packed(stored, config()).shards))):
        for batch, expected in zip(micro_batches(shards), micro_batches(here.shards), strict=True):
            assert encode(arrays(batch)) == encode(arrays(expected))
            assert batch.support is not None and batch.images is not None and (batch.tokens > 0).any()


def test_a_row_ships_no_record_of_hooks():
    group = full_group(1, 2)
    for groups in ([group], [summarize(group, HeldColumns)]):
        for batch in micro_batches(pickle.loads(pickle.dumps(packed(groups, config()).shards))):
            for row in batch.members:
                sent = set_fields(row.trajectory)
                assert not any(sent.get(name) for name in ("metadata", "metrics", "timings"))
    assert group.trajectories[0].metadata and group.trajectories[0].timings


def test_all_columns_of_a_call_are_loaded_at_once():
    stored = [summarize(full_group(number), HeldColumns) for number in range(4)]
    shards = packed(stored, config()).shards
    batches = list(micro_batches([shards[0], ("other", 3)]))
    assert batches == shards[0]
    fetch_rows(batches)
    handles = {id(row.trajectory.columns): row.trajectory.columns for batch in batches for row in batch.members}
    assert sum((handle.fetched for handle in handles.values()), []) == [len(handles)]
    fetch_rows([])


def test_a_column_that_the_driver_sets_reaches_the_rank():
    (rows,) = make_update_rows(config(), [summarize(full_group(1), HeldColumns)], lambda groups: [0.0] * 4)
    for number, row in enumerate(rows):
        row.advantages = np.full(len(row), number, np.float32)
        row.values = -row.advantages
        row.routed_experts = None
    for batch in micro_batches(pickle.loads(pickle.dumps(pack(rows, data_size=1, max_tokens=100).shards))):
        for number, start in zip(batch.rows, np.cumsum([0, *batch.lengths]), strict=False):
            part = slice(start, start + len(rows[number]))
            assert (batch.advantages[part] == number).all() and (batch.values[part] == -number).all()


def test_the_critics_rows_lack_what_only_the_policy_reads():
    (rows,) = make_update_rows(config(), [summarize(full_group(1, routes=True), LostColumns)], lambda groups: [0.0] * 4)
    for row, bare in zip(rows, _bare(rows), strict=True):
        assert bare.routed_experts is None and bare.support is None and bare.teacher_logprobs is None
        assert not bare.routed and row.routed and len(bare) == len(row)
    (rows,) = make_update_rows(config(), [full_group(1, routes=True)], lambda groups: [0.0] * 4)
    for row, bare in zip(rows, _bare(rows), strict=True):
        columns = (row.trajectory.routed_experts, row.trajectory.support, row.trajectory.teacher_logprobs)
        assert (
            len(pickle.dumps(row)) - len(pickle.dumps(bare)) > sum(len(pickle.dumps(column)) for column in columns) / 2
        )


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "reinforce_pp"},
        {"loss": {"kind": "clip_cov"}},
        {"loss": {"kind": "kl_cov"}},
        {"mask_stale_tokens": True},
        {"name": "distillation", "teacher_engine": "wise"},
    ],
)
def test_algorithms_that_need_columns_in_the_driver_load_them(algorithm):
    settings = config(**algorithm)
    found = []
    for store in (None, HeldColumns):
        groups = [full_group(number) for number in range(3)]
        if store is not None:
            groups = [summarize(group, store) for group in groups]
        if settings.algorithm.mask_stale_tokens:
            groups = [group.newest_only() for group in groups]
        updates = make_update_rows(settings, groups, partial(all_advantages, settings.algorithm))
        metrics = finish_advantages(settings.algorithm, StepData(groups=groups, updates=updates, seed=(0, 1)))
        shards = pack(updates[0], data_size=2, max_tokens=100).shards
        found.append((metrics, [arrays(batch) for batch in micro_batches(pickle.loads(pickle.dumps(shards)))]))
    assert encode(found[0]) == encode(found[1])


def test_a_teachers_missing_column_is_refused_before_training():
    settings = config(name="distillation", teacher_engine="wise")
    group = full_group(1)
    group.trajectories[2].teacher_logprobs = None
    with refused("data.column", about="g1/2"):
        make_update_rows(settings, [summarize(group, HeldColumns)], lambda groups: [0.0] * 4)


def test_weights_of_trained_tokens_are_numbers():
    trajectories = trajectories_of([summarize(full_group(number), LostColumns) for number in range(2)])
    weights = trained_weights(trajectories, "sample")
    assert sum(w * t.trained_tokens for w, t in zip(weights, trajectories, strict=True)) == pytest.approx(1)
    assert Counter(type(row).__name__ for row in make_rows(trajectories, [0.0] * 8, weights)) == {"LazyRow": 8}
