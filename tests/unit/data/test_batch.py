"""Packing changes nothing: every token is trained once, where it belongs, with its share of the global denominator."""

from __future__ import annotations

import numpy as np
import pytest

from slimx.data.balance import balance
from slimx.data.batch import MicroBatch, TrainingRow, make_rows
from slimx.data.columns import COLUMNS
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import distribute, pack, slowdown
from slimx.data.records import Span, Trajectory
from tests.refusals import refused

ARRAYS = ("tokens", "labels", "weight", "advantages", "rollout_logprobs", "versions", "temperature")


def trajectory(mask: list[int], **changes: object) -> Trajectory:
    """Returns a demonstration of `len(mask)` tokens: nothing sampled."""
    fields = {
        "id": "g/0",
        "rollout_id": "g/0",
        "group_id": "g",
        "index": 0,
        "token_ids": np.arange(1, len(mask) + 1, dtype=np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.full(len(mask), np.nan, np.float32),
        "spans": [Span(start=0, stop=len(mask), source="inserted")],
    }
    return Trajectory(**{**fields, **changes})


# Weights --------------------------------------------------------------------------------------------------------------


def test_token_weights_count_every_trained_token_alike():
    batch = [trajectory([0, 1, 1, 0]), trajectory([0, 0, 1]), trajectory([0, 1])]
    weights = loss_weights(batch, "token")
    assert [w.tolist() for w in weights] == [[0.25, 0.25, 0.0], [0.0, 0.25], [0.25]]


def test_sample_weights_count_trajectories_equally():
    masks = {"a": [0, 1, 1, 0], "b": [0, 0, 0], "c": [0, 1]}
    weights = loss_weights([trajectory(mask, rollout_id=name) for name, mask in masks.items()], "sample")
    assert [w.tolist() for w in weights] == [[0.25, 0.25, 0.0], [0.0, 0.0], [0.5]]


def test_the_first_token_has_no_prediction_and_no_weight():
    weights = loss_weights([trajectory([1, 1, 0])], "token")
    assert weights[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt"])
def test_weights_sum_to_one_for_any_masks(aggregation):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        masks = [rng.integers(0, 2, rng.integers(2, 200)) for _ in range(rng.integers(1, 40))]
        masks.append(np.array([0, 1]))
        batch = [trajectory(mask.tolist(), rollout_id=str(n // 2)) for n, mask in enumerate(masks)]
        weights = loss_weights(batch, aggregation)
        assert all(w.dtype == np.float32 for w in weights)
        assert sum(w.astype(np.float64).sum() for w in weights) == pytest.approx(1, abs=1e-6), seed
        for mask, weight in zip(masks, weights, strict=True):
            assert ((weight > 0) == (mask[1:] > 0)).all()


@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt"])
def test_a_batch_that_trains_no_token_is_refused(aggregation):
    with refused("data.untrained", about="loss_mask"):
        loss_weights([trajectory([1, 0, 0]), trajectory([0, 0])], aggregation)


# Shifting by one ------------------------------------------------------------------------------------------------------


def test_every_array_of_a_row_is_aligned_with_the_token_that_it_predicts():
    """Prompt 1 20 21, sampled 5 6 by version 3, inserted 30, sampled 7 3 by version 4; token 6 is kept out of the
    loss."""
    nan = float("nan")
    example = trajectory(
        [0, 0, 0, 1, 0, 0, 1, 1],
        token_ids=np.array([1, 20, 21, 5, 6, 30, 7, 3], np.int32),
        logprobs=np.array([nan, nan, nan, -0.5, -0.25, nan, -1.5, -2.0], np.float32),
        spans=[
            Span(start=0, stop=3, source="prompt"),
            Span(start=3, stop=5, source="sampled", version=3),
            Span(start=5, stop=6, source="inserted", turn=1),
            Span(start=6, stop=8, source="sampled", turn=1, version=4),
        ],
        sampling={"temperature": 0.7, "seed": 9},
        routed_experts=np.arange(14, dtype=np.uint8).reshape(7, 1, 2),
    )
    third = np.float32(1 / 3)
    (row,) = make_rows([example], [-1.25], loss_weights([example], "token"))
    assert row.tokens.tolist() == [1, 20, 21, 5, 6, 30, 7]
    assert row.labels.tolist() == [20, 21, 5, 6, 30, 7, 3]
    assert row.weight.tolist() == [0, 0, third, 0, 0, third, third]
    assert row.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1.5, -2.0]
    assert row.versions.tolist() == [-1, -1, 3, 3, -1, 4, 4]
    assert row.advantages.tolist() == [-1.25] * 7
    assert row.temperature.tolist() == [np.float32(0.7)] * 7
    # The experts of position t are those that token t was sent to, whatever it predicts.
    assert row.routed_experts[:, 0, 0].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert len(row) == 7
    assert [row.tokens.dtype, row.labels.dtype, row.versions.dtype] == [np.int64] * 3
    assert [row.weight.dtype, row.rollout_logprobs.dtype, row.advantages.dtype] == [np.float32] * 3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": None}])
def test_greedy_and_unsampled_rows_have_temperature_one(sampling):
    example = trajectory([0, 1], sampling=sampling)
    assert make_rows([example], [1.0], loss_weights([example], "token"))[0].temperature.tolist() == [1.0]


def test_a_column_without_source_is_none_for_all_or_refused_for_some():
    with_it, without = trajectory([0, 1, 1], id="a"), trajectory([0, 1], id="b", logprobs=None)

    def rows(*trajectories):
        weights = [np.ones(len(t.token_ids) - 1, np.float32) for t in trajectories]
        return make_rows(trajectories, [0.0] * len(trajectories), weights)

    assert [row.rollout_logprobs for row in rows(without, without)] == [None, None]
    for trajectories in ((with_it, without), (without, with_it)):
        with refused("data.column", about="b"):
            rows(*trajectories)


def test_each_trajectory_keeps_its_advantage():
    batch = [trajectory([0, 1, 1]), trajectory([0, 1]), trajectory([0, 1, 1, 1])]
    rows = make_rows(batch, [0.5, -2.0, 3.0], loss_weights(batch, "token"))
    assert [row.advantages.tolist() for row in rows] == [[0.5] * 2, [-2.0], [3.0] * 3]


# Packing --------------------------------------------------------------------------------------------------------------


def numbered_row(number: int, length: int, *, routes: bool) -> TrainingRow:
    """Makes a row whose every value encodes its row and its position."""
    values = 1000 * (number + 1) + np.arange(length)
    experts = np.stack([values, values + 7], 1)[:, None].astype(np.uint16)
    return TrainingRow(
        tokens=values,
        labels=values + 1,
        weight=values.astype(np.float32) / 2**20,
        advantages=values.astype(np.float32) + 2,
        rollout_logprobs=-values.astype(np.float32),
        versions=values + 3,
        temperature=np.full(length, number + 1.0, np.float32),
        routed_experts=experts if routes else None,
    )


def test_every_column_is_packed_with_its_dtype_and_its_fill_in_padding():
    columns = {name: np.full((3, 2), 7, column.dtype) for name, column in COLUMNS.items()}
    ((batch,),) = pack([TrainingRow(**columns)], data_size=1, max_tokens=8, multiple_of=4).shards
    for name, column in COLUMNS.items():
        packed = getattr(batch, name)
        assert packed.dtype == column.dtype, name
        assert packed.tolist() == [[7, 7]] * 3 + [[column.fill] * 2], name


def sequences(batch: MicroBatch) -> list[dict[str, np.ndarray]]:
    """Returns the packed sequences of a micro-batch, padding included."""
    names = (*ARRAYS, "routed_experts") if batch.routed_experts is not None else ARRAYS
    ends = np.cumsum(batch.lengths)
    return [
        {name: getattr(batch, name)[end - length : end] for name in names}
        for end, length in zip(ends, batch.lengths, strict=True)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_packing_loses_repeats_and_reorders_nothing_within_its_limits(seed):
    rng = np.random.default_rng(seed)
    data_size, multiple_of = int(rng.integers(1, 5)), int(rng.choice([1, 2, 8]))
    sequence_multiple = int(rng.choice([1, 1, 4, 6]))
    lengths = rng.integers(1, 40, rng.integers(data_size, 60)).tolist()
    limit = int(rng.integers(max(lengths) + sequence_multiple, 3 * max(lengths) + sequence_multiple + 1))
    routes = bool(rng.integers(0, 2))
    rows = [numbered_row(number, length, routes=routes) for number, length in enumerate(lengths)]

    batch = pack(
        rows,
        data_size=data_size,
        max_tokens=limit,
        multiple_of=multiple_of,
        sequence_multiple=sequence_multiple,
        lockstep=bool(rng.integers(0, 2)),
    )

    assert len(batch.shards) == data_size
    assert len({len(shard) for shard in batch.shards}) == 1, "ranks with different numbers of micro-batches deadlock"
    found: dict[int, dict[str, np.ndarray]] = {}
    for micro in (micro for shard in batch.shards for micro in shard):
        total = len(micro.tokens)
        assert total == sum(micro.lengths) and total % multiple_of == 0 and total > 0
        assert all(length % sequence_multiple == 0 for length in micro.lengths)
        assert all(len(getattr(micro, name)) == total for name in (*ARRAYS, "padding"))
        assert micro.routed_experts is None or len(micro.routed_experts) == total
        parts = sequences(micro)
        # Real tokens are positive here; those of padding are 0.
        assert np.array_equal(micro.padding, micro.tokens == 0)
        empty = [part for part in parts if not part["tokens"].any()]
        assert len(empty) <= 1 and all(part is parts[-1] for part in empty)
        assert all(len(part["tokens"]) < np.lcm(multiple_of, sequence_multiple) or len(parts) == 1 for part in empty)
        used = parts[: len(parts) - len(empty)]
        assert sum(len(part["tokens"]) for part in used) <= limit
        for part in parts:
            real = np.count_nonzero(part["tokens"])
            assert part["tokens"][:real].all(), "the padding of a row is at its end"
            rest = {name: values[real:] for name, values in part.items()}
            for name in ("tokens", "labels", "weight", "advantages", "rollout_logprobs"):
                assert not rest[name].any(), name
            assert (rest["versions"] == -1).all() and (rest["temperature"] == 1).all()
            assert not routes or "routed_experts" not in rest or not rest["routed_experts"].any()
        for part in used:
            number = int(part["tokens"][0] // 1000 - 1)
            assert number not in found, f"row {number} was packed twice"
            assert len(part["tokens"]) - lengths[number] in range(sequence_multiple)
            found[number] = {name: values[: lengths[number]] for name, values in part.items()}
    assert sorted(found) == list(range(len(rows)))
    for number, part in found.items():
        expected = {name: getattr(rows[number], name) for name in part if name != "temperature"}
        expected["temperature"] = np.full(lengths[number], number + 1, np.float32)
        for name, value in expected.items():
            assert np.array_equal(part[name], value), (number, name)
            assert part[name].dtype == value.dtype, name
    assert batch.tokens == sum(lengths)


def test_the_padding_of_a_row_counts_towards_the_limit():
    rows = [numbered_row(number, 5, routes=False) for number in range(2)]
    (shard,) = pack(rows, data_size=1, max_tokens=12, sequence_multiple=8).shards
    assert [micro.lengths for micro in shard] == [[8], [8]]
    with refused("data.microbatch", about="trainer.max_tokens_per_microbatch"):
        pack(rows, data_size=1, max_tokens=7, sequence_multiple=8)


def test_weights_still_sum_to_one_after_packing():
    rng = np.random.default_rng(3)
    batch = [trajectory([0, *rng.integers(0, 2, rng.integers(2, 30)).tolist(), 1]) for _ in range(17)]
    for aggregation in ("token", "sample"):
        rows = make_rows(batch, [1.0] * len(batch), loss_weights(batch, aggregation))
        packed = pack(rows, data_size=2, max_tokens=50, multiple_of=2)
        weights = [micro.weight for shard in packed.shards for micro in shard]
        assert len(weights) > 4
        assert np.concatenate(weights).astype(np.float64).sum() == pytest.approx(1, abs=1e-6)
        assert (np.concatenate(weights) > 0).sum() == sum(one.trained_tokens for one in batch) < packed.tokens


def test_no_rank_gets_more_tokens_than_another_by_more_than_one_row():
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 100, 37).tolist()
        totals = [sum(lengths[i] for i in part) for part in balance(lengths, 4)]
        assert sum(totals) == sum(lengths)
        assert max(totals) - min(totals) <= max(lengths)


def test_rows_that_fit_together_are_packed_together():
    rows = [numbered_row(number, 5, routes=False) for number in range(8)]
    for limit, count in ((40, 1), (20, 2), (19, 3), (9, 8)):
        (shard,) = pack(rows, data_size=1, max_tokens=limit).shards
        assert len(shard) == count, limit


def test_a_rank_with_too_few_rows_gets_micro_batches_of_padding():
    """Ten tokens against six and six under a limit of ten: the second rank needs two micro-batches, the first has one
    row."""
    rows = [numbered_row(number, length, routes=True) for number, length in enumerate((10, 6, 6))]
    first, second = pack(rows, data_size=2, max_tokens=10, multiple_of=4).shards
    assert [micro.lengths for micro in first] == [[10, 2], [4]]
    assert [micro.lengths for micro in second] == [[6, 2], [6, 2]]
    empty = first[1]
    assert not empty.weight.any() and empty.temperature.tolist() == [1.0] * 4 and empty.routed_experts is None


def test_a_trajectory_beyond_a_micro_batch_is_refused():
    rows = [numbered_row(0, 5, routes=False), numbered_row(1, 33, routes=False)]
    with refused("data.microbatch", about="trainer.max_tokens_per_microbatch"):
        pack(rows, data_size=1, max_tokens=32)


def test_fewer_trajectories_than_data_parallel_ranks_are_refused():
    with refused("data.update", about="trainer.data"):
        pack([numbered_row(n, 5, routes=False) for n in range(2)], data_size=3, max_tokens=32)


def test_a_micro_batch_says_which_of_its_rows_came_with_routes():
    rows = [numbered_row(0, 5, routes=False), numbered_row(1, 5, routes=True)]
    ((micro,),) = pack(rows, data_size=1, max_tokens=32, multiple_of=4).shards
    for number, start in zip(micro.rows, np.cumsum([0, *micro.lengths]), strict=False):
        part = slice(start, start + len(rows[number]))
        assert micro.routed[part].all() if rows[number].routed_experts is not None else not micro.routed[part].any()
        if number == 1:
            assert np.array_equal(micro.routed_experts[part], rows[1].routed_experts)
    assert not micro.routed[micro.padding].any()


def test_rows_whose_routes_have_other_shapes_are_refused():
    rows = [numbered_row(0, 5, routes=True), numbered_row(1, 5, routes=True)]
    rows[1].routed_experts = rows[1].routed_experts[:, :0]
    ((micro,),) = pack(rows, data_size=1, max_tokens=32).shards
    with refused("data.routes", about="routed_experts"):
        _ = micro.tokens


@pytest.mark.parametrize("multiple", [2, 3, 4])
def test_micro_batches_are_a_multiple_for_interleaved_pipelines(multiple):
    for seed in range(10):
        lengths = np.random.default_rng(seed).integers(1, 30, 11).tolist()
        rows = [numbered_row(number, length, routes=False) for number, length in enumerate(lengths)]
        batch = pack(rows, data_size=2, max_tokens=40, count_multiple=multiple, lockstep=bool(seed % 2))
        for shard in batch.shards:
            assert len(shard) % multiple == 0
            assert all(sum(micro.lengths) <= 40 for micro in shard if not micro.padding.all())
        found = sorted(int(part["tokens"][0]) for shard in batch.shards for m in shard for part in sequences(m))
        assert [token for token in found if token] == [1000 * (number + 1) for number in range(11)]


def test_ranks_get_equal_cost_where_tokens_would_mislead():
    """By tokens one row of 60 weighs as much as three of 20; where cost is quadratic it weighs as much as nine."""
    lengths = [60, *[20] * 11]
    rows = [numbered_row(number, length, routes=False) for number, length in enumerate(lengths)]
    by_tokens = pack(rows, data_size=2, max_tokens=80)
    by_cost = pack(rows, data_size=2, max_tokens=80, cost=lambda tokens: float(tokens**2))
    assert [sum(len(m.tokens) for m in shard) for shard in by_tokens.shards] == [140, 140]
    assert by_tokens.imbalance == 0
    assert [sum((~m.padding).sum() for m in shard) for shard in by_cost.shards] == [80, 200]
    assert by_cost.imbalance == 0


def test_the_best_split_depends_on_the_synchronization():
    """Ranks that meet once per step want equal totals, ranks that share experts want equal k-th micro-batches: over
    many batches each split is predicted to be faster than the other one where it belongs, and near perfect there."""
    predicted = {(made, waits): [] for made in (False, True) for waits in (False, True)}
    for seed in range(30):
        lengths = np.random.default_rng(seed).lognormal(5, 1.0, 8 * 32).astype(int).clip(1, 2000).tolist()
        costs = [length + length**2 / 2000 for length in lengths]
        for made in (False, True):
            split = distribute(lengths, costs, data_size=8, max_tokens=2000, lockstep=made)
            for waits in (False, True):
                predicted[made, waits].append(slowdown(split, costs, lockstep=waits))
    medians = {key: np.median(values) for key, values in predicted.items()}
    assert medians[False, False] < 1.001 < 1.05 < medians[True, False], medians
    assert medians[True, True] < 1.13 < medians[False, True], medians


def test_in_lockstep_the_lightest_rank_gets_the_heaviest_row():
    """Micro-batches of 10 and 8, then of 7 and 1: 10 + 1 and 8 + 7."""
    split = distribute([10, 8, 7, 1], [10, 8, 7, 1], data_size=2, max_tokens=10, lockstep=True)
    assert split == [[[0], [3]], [[1], [2]]]


@pytest.mark.parametrize("lockstep", [False, True])
def test_the_predicted_slowdown_is_that_of_the_ranks_that_are_waited_for(lockstep):
    """Two ranks, costs 5 3 and 2 4: totals of 8 and 6 around 7; in lockstep 5 + 4."""
    split = [[[0], [1]], [[2], [3]]]
    assert slowdown(split, [5, 3, 2, 4], lockstep=lockstep) == pytest.approx(9 / 7 if lockstep else 8 / 7)


def test_a_tight_limit_costs_balance_and_no_micro_batch():
    """30 tokens in two micro-batches of 15: only 9 + 6 and 8 + 7 fit, which balancing by a misleading cost misses."""
    rows = [numbered_row(number, length, routes=False) for number, length in enumerate((9, 8, 7, 6))]
    (shard,) = pack(rows, data_size=1, max_tokens=15, cost=lambda tokens: float(tokens**8)).shards
    assert sorted(sorted(micro.lengths) for micro in shard) == [[6, 9], [7, 8]]
