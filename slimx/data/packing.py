"""Rows -> micro-batches of equal number on every data-parallel rank, and the tokens of one that a context-parallel rank
holds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import lcm
from typing import Any

import numpy as np

from slimx.data.balance import balance, greedy_with_room
from slimx.data.batch import MicroBatch, TrainBatch, TrainingRow
from slimx.data.columns import COLUMNS
from slimx.data.support import Support
from slimx.errors import SlimxError

Split = list[list[list[int]]]
"""`split[d][k]`: the rows of micro-batch k of data-parallel rank d."""


def pack(
    rows: Sequence[TrainingRow],
    *,
    data_size: int,
    max_tokens: int,
    multiple_of: int = 1,
    sequence_multiple: int = 1,
    count_multiple: int = 1,
    cost: Callable[[int], float] = float,
    lockstep: bool = False,
) -> TrainBatch:
    """Distribute rows over data-parallel ranks by cost, in equally many micro-batches on every rank, as few as fit.

    `sequence_multiple`: every row is padded at its end to a multiple of it (context parallelism cuts each sequence
    into 2 x CP chunks). `multiple_of`: T of each micro-batch is padded to a multiple of it (sequence parallelism wants
    TP x CP). The padding of rows counts towards `max_tokens`, the padding of T does not. `count_multiple`: so is the
    number of micro-batches of a rank (megatron's interleaved pipeline wants the PP size); a rank with too few rows gets
    micro-batches of padding only. `cost`: of computing a row of so many tokens; in tokens unless told. `lockstep`: see
    `distribute`.

    Raises SlimxError naming the row that alone exceeds `max_tokens`.
    """
    sizes = [padded(len(row), sequence_multiple) for row in rows]
    if max(sizes) > max_tokens:
        length = max(len(row) for row in rows) + 1
        note = f" (padded to a multiple of {sequence_multiple})" if sequence_multiple > 1 else ""
        raise SlimxError(
            f"a trajectory of {length} tokens{note} does not fit trainer.max_tokens_per_microbatch={max_tokens}; "
            f"raise it or lower rollout.sampling.max_new_tokens",
            code="data.microbatch",
            about="trainer.max_tokens_per_microbatch",
        )
    if len(rows) < data_size:
        raise SlimxError(
            f"an update of {len(rows)} trajectories cannot feed {data_size} data-parallel ranks; lower trainer.data or "
            "schedule.updates_per_step",
            code="data.update",
            about="trainer.data",
        )
    costs = [cost(size) for size in sizes]
    split = distribute(
        sizes,
        costs,
        data_size=data_size,
        max_tokens=max_tokens,
        count_multiple=count_multiple,
        lockstep=lockstep,
    )
    return TrainBatch(
        shards=lay_out(rows, split, multiple_of=multiple_of, sequence_multiple=sequence_multiple),
        tokens=sum(len(row) for row in rows),
        trained_tokens=int(sum((row.weight > 0).sum() for row in rows)),
        imbalance=slowdown(split, costs, lockstep=lockstep) - 1,
    )


def distribute(
    sizes: Sequence[int],
    costs: Sequence[float],
    *,
    data_size: int,
    max_tokens: int,
    count_multiple: int = 1,
    lockstep: bool = False,
) -> Split:
    """The rows of each micro-batch of each rank; `sizes`: tokens of each row, none above `max_tokens`.

    Ranks that meet only at the end of a step, where gradients are summed, get equal totals: first ranks are balanced,
    then each rank's micro-batches. With `lockstep` they meet in every micro-batch, because they share experts, and the
    k-th micro-batches of all ranks must cost alike: first all micro-batches are balanced, then neighbours in the order
    of cost are dealt out as k-th ones, the heaviest to the rank with the least so far.
    """
    if not lockstep:
        shards = balance(costs, data_size)
        count = max(len(best_fit([sizes[i] for i in shard], max_tokens)) for shard in shards)
        count = padded(count, count_multiple)
        return [_microbatches(shard, sizes, costs, count, max_tokens) for shard in shards]
    count = padded(-(-len(best_fit(sizes, max_tokens)) // data_size), count_multiple)
    parts = _microbatches(range(len(sizes)), sizes, costs, count * data_size, max_tokens)
    split: Split = [[] for _ in range(data_size)]
    totals = [0.0] * data_size
    for first in range(0, len(parts), data_size):
        lightest = sorted(range(data_size), key=lambda rank: (totals[rank], rank))
        for rank, part in zip(lightest, parts[first : first + data_size], strict=True):
            split[rank].append(part)
            totals[rank] += sum(costs[i] for i in part)
    return split


def slowdown(split: Split, costs: Sequence[float], *, lockstep: bool) -> float:
    """Predicted time of a step over that of perfect balance, from 1 (see `distribute`)."""
    table = [[sum(costs[i] for i in part) for part in parts] for parts in split]
    mean = sum(map(sum, table)) / len(table)
    return (sum(map(max, zip(*table, strict=True))) if lockstep else max(map(sum, table))) / mean


def lay_out(
    rows: Sequence[TrainingRow], split: Split, *, multiple_of: int = 1, sequence_multiple: int = 1
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank (see `pack`)."""
    multiple_of = lcm(multiple_of, sequence_multiple)
    return [[_pack_rows(rows, part, multiple_of, sequence_multiple) for part in parts] for parts in split]


def best_fit(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices in bins of at most `limit`, longest first, each into the fullest bin that has room for it: hardly more
    than 11/9 of the fewest bins that could do (Johnson et al. 1974)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is left of a bin and its number, ascending
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(rooms, (sizes[index], 0))
        if place == len(rooms):
            room, number = limit, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(place)
        bins[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return bins


def _microbatches(
    rows: Sequence[int], sizes: Sequence[int], costs: Sequence[float], count: int, limit: int
) -> list[list[int]]:
    """`rows` in `count` micro-batches of at most `limit` tokens, as equal in cost as that allows; heaviest first.
    `count` is at least what best fit needs, so that there is always an answer."""
    size, cost = [sizes[i] for i in rows], [costs[i] for i in rows]
    parts: list[list[int]] | None = balance(cost, count)
    if any(sum(size[i] for i in part) > limit for part in parts):
        parts = greedy_with_room(cost, size, count, limit)
    if parts is None:
        parts = best_fit(size, limit)
        parts += [[] for _ in range(count - len(parts))]
    parts.sort(key=lambda part: -sum(cost[i] for i in part))
    return [[rows[i] for i in sorted(part)] for part in parts]


def padded(number: int, multiple: int) -> int:
    """`number`, or the next multiple of `multiple` above it."""
    return -(-number // multiple) * multiple


def _pack_rows(
    all_rows: Sequence[TrainingRow], numbers: list[int], multiple_of: int, sequence_multiple: int
) -> MicroBatch:
    """One micro-batch of rows `numbers`; without any it is `multiple_of` tokens of padding."""
    rows = [all_rows[number] for number in numbers]
    lengths = [padded(len(row), sequence_multiple) for row in rows]
    tail = -sum(lengths) % multiple_of or (multiple_of if not rows else 0)
    if tail:
        lengths.append(tail)

    def joined(parts: Sequence[np.ndarray], dtype: Any, pad: float = 0, shape: tuple[int, ...] = ()) -> np.ndarray:
        """The rows' arrays at their places among `pad`; `shape` of a position where there are no rows."""
        shape = parts[0].shape[1:] if parts else shape
        out = np.full((sum(lengths), *shape), pad, dtype)
        at = 0
        for part, length in zip(parts, lengths, strict=False):  # a tail has no part of its own
            out[at : at + len(part)] = part
            at += length
        return out

    routes, routed = _joined_routes(rows, joined)
    arrays = {}
    for name, column in COLUMNS.items():
        first = getattr(all_rows[0], name)
        if first is not None:
            parts = [getattr(row, name) for row in rows]
            arrays[name] = joined(parts, column.dtype, column.fill, shape=first.shape[1:])
    return MicroBatch(
        **arrays,
        lengths=lengths,
        padding=joined([np.zeros(len(row), bool) for row in rows], bool, True),
        routed_experts=routes,
        routed=routed,
        rows=numbers,
        support=_joined_support(rows, lengths),
    )


def _joined_routes(
    rows: Sequence[TrainingRow], joined: Callable[..., np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`routed_experts` and `routed` of a micro-batch of `rows`; `joined` puts arrays of rows at their places."""
    known = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not known:
        return None, None
    if len(shapes := {each.shape[1:] for each in known}) > 1:
        raise SlimxError(
            f"trajectories of a batch carry routed_experts of the shapes {sorted(map(list, shapes))} a token; train "
            "rollouts of one model",
            code="data.routes",
            about="routed_experts",
        )
    (shape,), dtype = shapes, known[0].dtype
    parts = [np.zeros((len(row), *shape), dtype) if row.routed_experts is None else row.routed_experts for row in rows]
    if len(known) == len(rows):
        return joined(parts, dtype), None
    return joined(parts, dtype), joined([np.full(len(row), row.routed_experts is not None) for row in rows], bool)


def _joined_support(rows: Sequence[TrainingRow], lengths: Sequence[int]) -> Support | None:
    """The rows' supports at their places; rows without one, and padding, are not restricted."""
    if all(row.support is None for row in rows):
        return None
    parts: list[Support] = []
    for row, length in zip_longest(rows, lengths):  # a tail has no row of its own
        held = row.support if row is not None else None
        parts += [held, Support.everything(length - len(held))] if held is not None else [Support.everything(length)]
    return Support.join(parts)


def zigzag(lengths: Sequence[int], size: int, rank: int) -> np.ndarray:
    """Positions in the pack, int64 [T / size], that context-parallel rank `rank` of `size` holds, in its own order.

    Each sequence is cut into 2 * size equal pieces; a rank holds pieces `rank` and 2 * size - 1 - `rank` (zigzag), so
    that under a causal mask every rank has the same work. This is the order that megatron-core's rotary embedding and
    Transformer Engine's attention assume.

    Raises SlimxError for a sequence that does not divide into 2 * size pieces."""
    if size == 1:
        return np.arange(sum(lengths))
    pieces, start = [], 0
    for length in lengths:
        if length % (2 * size):
            raise SlimxError(
                f"a packed sequence of {length} tokens does not divide into {2 * size} pieces for trainer.context="
                f"{size}; it must be padded before it is packed",
                code="layout.zigzag",
                about="trainer.context",
            )
        cut = np.arange(start, start + length).reshape(2 * size, -1)
        pieces += [cut[rank], cut[2 * size - 1 - rank]]
        start += length
    return np.concatenate(pieces)
