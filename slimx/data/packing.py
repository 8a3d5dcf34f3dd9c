"""Packing of rows into micro-batches, the same number on every data-parallel rank, and the positions that a
context-parallel rank processes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import chain, zip_longest
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from slimx.data.balance import balance, greedy_with_room, total
from slimx.data.batch import LazyRow, MicroBatch, TrainBatch, TrainingRow
from slimx.data.columns import COLUMNS
from slimx.data.lazy import Lazy, set_fields
from slimx.data.sampling_support import Support
from slimx.data.stored import fetch
from slimx.errors import SlimxError

Split = list[list[list[int]]]
"""`split[d][k]`: row indices of micro-batch k of data-parallel rank d."""


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
    """Packs rows into micro-batches, and distributes these over `data_size` data-parallel ranks so that ranks have
    nearly equal cost. Every rank gets the same number of micro-batches, as few as possible.

    - `max_tokens`: maximum number of tokens of a micro-batch.
    - `multiple_of`: the number of positions of each micro-batch is padded to a multiple of this number (TP x CP for
      sequence parallelism). This padding does not count toward `max_tokens`.
    - `sequence_multiple`: each row is padded at its end to a multiple of this number (context parallelism splits each
      sequence into 2 x CP chunks). This padding counts toward `max_tokens`.
    - `count_multiple`: the number of micro-batches of a rank is a multiple of this number (the PP size for megatron's
      interleaved pipeline); a rank with too few rows gets micro-batches of padding only.
    - `cost`: function that returns the predicted cost of a row from its number of tokens; default: the number of
      tokens.
    - `lockstep`: True if ranks wait for each other in every micro-batch, because they share experts (see `distribute`).

    Raises SlimxError if a row alone exceeds `max_tokens`, or if there are fewer rows than ranks.
    """
    sizes = [padded(len(row), sequence_multiple) for row in rows]
    if max(sizes) > max_tokens:
        length = max(len(row) for row in rows) + 1
        note = f" (padded to a multiple of {sequence_multiple})" if sequence_multiple > 1 else ""
        raise SlimxError(
            f"a trajectory of {length} tokens{note} exceeds trainer.max_tokens_per_microbatch={max_tokens}; raise this "
            "limit, or lower rollout.sampling.max_new_tokens",
            code="data.microbatch",
            about="trainer.max_tokens_per_microbatch",
        )
    if len(rows) < data_size:
        raise SlimxError(
            f"an update needs a trajectory for each of {data_size} data-parallel ranks, but has only {len(rows)}; "
            "lower trainer.data or schedule.updates_per_step",
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
    """Distributes rows over data-parallel ranks, and each rank's rows over its micro-batches. `sizes`: number of tokens
    of each row, none above `max_tokens`; `costs`: predicted cost of each row; other parameters: see `pack`.

    Without `lockstep`, ranks synchronize only at the end of a step, when gradients are summed, so only their total
    costs are equalized: rows are balanced first over ranks, then over each rank's micro-batches.

    With `lockstep`, ranks share experts and synchronize in every micro-batch, so the k-th micro-batches of all ranks
    should have equal cost: rows are balanced over all micro-batches, which are then sorted by cost. Each group of
    `data_size` consecutive micro-batches provides the k-th micro-batch of every rank; the heaviest of the group goes to
    the rank with the lowest total so far.
    """
    if not lockstep:
        shards = balance(costs, data_size)
        count = 0
        for shard in shards:
            count = max(count, len(best_fit([sizes[i] for i in shard], max_tokens)))
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
            totals[rank] += total(costs, part)
    return split


def slowdown(split: Split, costs: Sequence[float], *, lockstep: bool) -> float:
    """Returns the predicted time of a step divided by its time under perfect balance; the quotient is at least 1.
    `lockstep`: True if ranks wait for each other in every micro-batch (see `distribute`)."""
    table = [[total(costs, part) for part in parts] for parts in split]
    totals = [sum(row) for row in table]
    mean = sum(totals) / len(totals)
    if lockstep:
        return sum(max(step) for step in zip(*table, strict=True)) / mean
    return max(totals) / mean


def lay_out(
    rows: Sequence[TrainingRow], split: Split, *, multiple_of: int = 1, sequence_multiple: int = 1
) -> list[list[MicroBatch]]:
    """Returns the micro-batches of each rank of `split`. `multiple_of`, `sequence_multiple`: multiples to which
    micro-batches and rows are padded, as in `pack`."""
    multiple_of = lcm(multiple_of, sequence_multiple)

    def planned(part: list[int]) -> MicroBatch:
        members = [rows[index] for index in part]
        lengths = [padded(len(row), sequence_multiple) for row in members]
        tail = -sum(lengths) % multiple_of
        if not part:  # the micro-batch consists of `multiple_of` padding positions
            tail = multiple_of
        if tail:
            lengths.append(tail)
        return LazyMicroBatch.holding({"lengths": lengths, "rows": part, "members": members or [rows[0]]})

    return [[planned(part) for part in parts] for parts in split]


class LazyMicroBatch(Lazy, MicroBatch):
    """Micro-batch whose arrays are laid out when one of them is first read, on the ranks that train on it."""

    __slots__ = ("computed", "members", "names")
    complete = MicroBatch
    members: list[TrainingRow]
    """Rows of the micro-batch; if it has none, another row of the update, which has the same columns. Freed
    when they are laid out with `route_layers`."""

    def compute(self) -> MicroBatch:
        members = list(map(copy, self.members))  # copies, whose columns are freed with them
        rows = members[: len(self.rows)]
        lengths = self.lengths

        def joined(
            parts: Sequence[np.ndarray], dtype: npt.DTypeLike, pad: float = 0, shape: tuple[int, ...] = ()
        ) -> np.ndarray:
            """Concatenates `parts`, one array per row, with the value `pad` at padding positions. `shape`: shape of one
            position's entry, used if `parts` is empty."""
            shape = parts[0].shape[1:] if parts else shape
            out = np.full((sum(lengths), *shape), pad, dtype)
            start = 0
            for part, length in zip(parts, lengths, strict=False):  # the micro-batch's own padding has no part
                out[start : start + len(part)] = part
                start += length
            return out

        layers = set_fields(self).get("route_layers")
        routes, routed = _joined_routes(rows, joined, slice(None) if layers is None else layers)
        arrays: dict[str, Any] = {}  # by field
        for name, column in COLUMNS.items():
            first = getattr(members[0], name)
            if first is not None:
                parts = [getattr(row, name) for row in rows]
                arrays[name] = joined(parts, column.dtype, column.fill, shape=first.shape[1:])
        if layers is not None:
            self.members = []
        return MicroBatch(
            **arrays,
            lengths=lengths,
            padding=joined([np.zeros(len(row), bool) for row in rows], bool, True),
            routed_experts=routes,
            routed=routed,
            rows=self.rows,
            images=[row.images for row in rows] if any(row.images for row in rows) else None,
            support=_joined_support(rows, lengths),
        )


def fetch_rows(batches: Iterable[MicroBatch]) -> None:
    """Loads the columns of all stored trajectories in `batches` at once."""
    rows = chain.from_iterable(batch.members for batch in batches if isinstance(batch, LazyMicroBatch))
    fetch(row.trajectory for row in rows if isinstance(row, LazyRow))


def best_fit(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Packs indices of `sizes` into bins whose total size is at most `limit` (best fit decreasing): the largest first,
    each into the fullest bin that still has enough space. The number of bins is at most about 11/9 of the minimum
    (Johnson et al. 1974)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free space of a bin and the bin's index, ascending
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fullest = bisect_left(rooms, (sizes[index], 0))
        if fullest == len(rooms):
            bins.append([])
            rooms.append((limit, len(bins) - 1))
        room, bin_index = rooms.pop(fullest)
        bins[bin_index].append(index)
        insort(rooms, (room - sizes[index], bin_index))
    return bins


def _microbatches(
    rows: Sequence[int], sizes: Sequence[int], costs: Sequence[float], count: int, limit: int
) -> list[list[int]]:
    """Splits `rows` into `count` micro-batches of at most `limit` tokens and nearly equal cost, the heaviest first.
    `count` must be at least the number of bins of `best_fit`, which guarantees that a split exists. `sizes` and
    `costs`: number of tokens and cost of every row of the update."""
    size = [sizes[i] for i in rows]
    cost = [costs[i] for i in rows]
    parts = balance(cost, count)
    if any(total(size, part) > limit for part in parts):
        bounded = greedy_with_room(cost, size, count, limit)
        if bounded is None:
            bounded = best_fit(size, limit)
            bounded += [[] for _ in range(count - len(bounded))]
        parts = bounded
    parts.sort(key=lambda part: -total(cost, part))
    return [[rows[i] for i in sorted(part)] for part in parts]


def padded(number: int, multiple: int) -> int:
    """Rounds `number` up to the nearest multiple of `multiple`."""
    return -(-number // multiple) * multiple


def _joined_routes(
    rows: Sequence[TrainingRow], joined: Callable[..., np.ndarray], layers: slice | tuple[int, ...]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns `routed_experts` and `routed` of the micro-batch that consists of `rows` (see `MicroBatch`). `joined`:
    concatenates one array per row, with padding. `layers`: indices of the layers whose routes are taken."""
    known = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not known:
        return None, None
    shapes = {routes.shape[1:] for routes in known}
    if len(shapes) > 1:
        raise SlimxError(
            f"trajectories of a batch have routed_experts of different shapes per token ({sorted(map(list, shapes))}); "
            "train each batch on rollouts of only one model",
            code="data.routes",
            about="routed_experts",
        )
    shape = known[0].shape[1:]
    dtype = known[0].dtype
    parts = []
    routed = []
    for row in rows:
        routes = row.routed_experts
        parts.append((np.zeros((len(row), *shape), dtype) if routes is None else routes)[:, layers])
        routed.append(np.full(len(row), routes is not None))
    if len(known) == len(rows):
        return joined(parts, dtype), None
    return joined(parts, dtype), joined(routed, bool)


def _joined_support(rows: Sequence[TrainingRow], lengths: Sequence[int]) -> Support | None:
    """Concatenates the supports of `rows`. Padding, and rows without a support, allow the whole vocabulary. `lengths`:
    number of positions of each packed sequence."""
    if all(row.support is None for row in rows):
        return None
    parts: list[Support] = []
    for row, length in zip_longest(rows, lengths):  # the micro-batch's own padding has no row
        padding = length
        if row is not None and row.support is not None:
            parts.append(row.support)
            padding -= len(row.support)
        parts.append(Support.everything(padding))
    return Support.join(parts)


def zigzag(lengths: Sequence[int], size: int, rank: int) -> np.ndarray:
    """Returns the positions, int64 [T / size], that rank `rank` of a context-parallel group of `size` ranks processes,
    in the rank's order. `lengths`: number of positions of each packed sequence.

    Each sequence is split into 2 * size equal chunks. A rank processes the chunks `rank` and 2 * size - 1 - `rank`
    (zigzag), which balances the work under a causal mask. megatron-core's rotary embedding and Transformer Engine's
    attention assume this order.

    Raises SlimxError for a sequence that cannot be split into 2 * size chunks."""
    if size == 1:
        return np.arange(sum(lengths))
    chunks: list[np.ndarray] = []
    start = 0
    for length in lengths:
        if length % (2 * size):
            raise SlimxError(
                f"a packed sequence of {length} tokens cannot be split into {2 * size} equal chunks for "
                f"trainer.context={size}; pad the sequence to a multiple of {2 * size} before packing",
                code="layout.zigzag",
                about="trainer.context",
            )
        cut = np.arange(start, start + length).reshape(2 * size, -1)
        chunks += [cut[rank], cut[2 * size - 1 - rank]]
        start += length
    return np.concatenate(chunks)
