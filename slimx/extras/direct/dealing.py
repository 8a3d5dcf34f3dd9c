"""Dealing: which trainer rank sends which bytes to which rank of every engine, with balanced load.

A compiled plan has, for one engine, the moves and the ranks that hold their bytes (`Plan.holders`). Dealing chooses
senders for all engines together, in two steps:

    share   bytes held by the same ranks are one amount. Amounts are distributed over their holders until the busiest
            rank sends the fewest bytes that the layouts allow.
    cut     the moves of one amount and bucket form a line that is cut by these shares (McNaughton, "Scheduling with
            deadlines and loss functions", 1959); a large move that crosses a cut is divided by rows. The line of the
            next bucket starts at a different offset, so that undivided moves rotate over the holders.

Engines are consecutive on the line: replicas of an engine receive the same bytes from different ranks. The bytes that a
rank receives depend only on the layouts and are not dealt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import psutil

from slimx.errors import SlimxError
from slimx.extras.direct.wire import move_bytes, quantized_moves
from slimx.reshard.plan.copy_plan import Holders, Plan

GRAIN = 2**18
"""Minimum bytes of a part of a divided move."""
CLOSE = 1e-3
"""Relative change of a rank's bytes below which a sweep over all amounts ends the sharing."""
SWEEPS = 200
"""Maximum number of sweeps."""
BYTES = 165
"""Maximum bytes of host memory per move of one engine, measured in test_dealing.py."""
TURN = (5**0.5 - 1) / 2
"""Fraction of its length by which the line of a bucket is rotated against the previous one; its multiples are evenly
distributed."""


def deal(plan: Plan, *, engines: int = 1, grain: int = GRAIN) -> Plan:
    """Returns `plan`, one engine's, extended to `engines` replicas: rank r of engine e is target e * plan.targets + r.

    `grain`: minimum bytes of a part of a divided move. The same inputs give the same plan."""
    if plan.holders is None:
        raise SlimxError(
            "dealing: this plan was read from bytes and has no holders; compile it again",
            code="dealing.holders",
            about="plan",
        )
    needed = len(plan.moved) * engines * BYTES
    free = psutil.virtual_memory().available
    if needed > free:
        raise SlimxError(
            f"dealing: {len(plan.moved)} moves to {engines} engines need {needed / 2**30:.0f} GiB of host memory, and "
            f"{free / 2**30:.0f} GiB are free; lower rollout.engines.count, or use a machine with more memory",
            code="dealing.memory",
            about="rollout.engines.count",
        )
    nbytes = move_bytes(plan)
    amounts = np.bincount(plan.holders.of, weights=nbytes, minlength=len(plan.holders.groups)) * engines
    shares = share(amounts, plan.holders.groups)
    moved = _cut(plan, plan.holders, nbytes, shares, engines, grain)
    order = np.lexsort((moved["row"], moved["tensor"], moved["target"], moved["source"], moved["bucket"]))
    return Plan(plan.precision, plan.parameters, plan.buckets * engines, moved[order], plan.unread)


def copies_of(plan: Plan, receivers: Sequence[int]) -> tuple[int, list[int]]:
    """Returns (number of copies of `plan`, one engine's, that engines of `receivers` receivers each load together;
    first target of each receiver in a plan dealt for that number, and the end).

    An engine's receivers share the targets of its ranks; a single target for all ranks (Hugging Face names) is sent to
    each of them."""
    if plan.targets == 1:
        return sum(receivers), list(range(sum(receivers) + 1))
    edges = []
    for engine, count in enumerate(receivers):
        edges += [engine * plan.targets + index * plan.targets // count for index in range(count)]
    return len(receivers), [*edges, len(receivers) * plan.targets]


def only(plan: Plan, target: int) -> Plan:
    """Returns the part of a dealt plan that fills one target, as its target 0."""
    moved = plan.moved[plan.moved["target"] == target].copy()
    moved["target"] = 0
    return Plan(plan.precision, plan.parameters, [plan.buckets[target]], moved)


def share(amounts: np.ndarray, holders: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Returns, for each amount [holders], the fraction that each of its holders sends; fractions sum to 1.

    Amounts are distributed in turn, each over its holders on top of the load of the others, until nothing changes. This
    minimizes the sum of squares over ranks, and with it the bytes of the busiest rank."""
    load = np.zeros(1 + max((ranks[-1] for ranks in holders), default=0))
    poured = [np.zeros(len(ranks)) for ranks in holders]
    # Amounts with the fewest holders first, because they have the least choice.
    order = sorted(range(len(holders)), key=lambda index: (len(holders[index]), holders[index]))
    for _ in range(SWEEPS):
        before = load.copy()
        for index in order:
            ranks = list(holders[index])
            others = load[ranks] - poured[index]
            poured[index] = _pour(others, amounts[index])
            load[ranks] = others + poured[index]
        if np.abs(load - before).max() <= CLOSE * load.max():
            break
    shares = []
    for parts in poured:
        if parts.sum():
            shares.append(parts / parts.sum())
        else:
            shares.append(np.full(len(parts), 1 / len(parts)))
    return shares


def _pour(load: np.ndarray, amount: float) -> np.ndarray:
    """Returns the part of `amount` that each rank gets if all are filled to one level, except those with a higher
    `load`."""
    low = np.sort(load)
    level = (amount + low.cumsum()) / np.arange(1, len(low) + 1)
    # The level of the k least loaded ranks is valid if it does not reach the next one.
    count = np.flatnonzero(np.append(low[1:], np.inf) >= level)[0]
    return np.maximum(level[count] - load, 0.0)


def _cut(
    plan: Plan, holders: Holders, nbytes: np.ndarray, shares: list[np.ndarray], engines: int, grain: int
) -> np.ndarray:
    """Returns the moves [more moves] of all engines, each with its sender."""
    moved = np.tile(plan.moved, engines)
    moved["target"] += np.repeat(np.arange(engines, dtype=np.int32) * plan.targets, len(plan.moved))
    moved["source"] = np.array([ranks[0] for ranks in holders.groups], dtype=np.int32)[np.tile(holders.of, engines)]
    # Rows of a block are not divided: its scale is computed on the rank that has the block.
    high = plan.precision.quantization.block[0] if plan.precision.quantization else 1
    unit = np.where(quantized_moves(plan), high, 1)
    least = -(-grain * plan.moved["rows"].astype(np.int64) // np.maximum(nbytes, 1))
    least = -(-np.maximum(least, 1) // unit) * unit
    divided: list[tuple[int, int, int, int]] = []
    """Index of a move, and first row, rows and sender of a part of it."""
    undivided = np.ones(len(moved), dtype=bool)
    for group, bucket, group_moves in _lines(plan, holders, np.array([len(parts) > 1 for parts in shares])):
        line = (group_moves + np.arange(engines)[:, None] * len(plan.moved)).ravel()
        size = np.tile(nbytes[group_moves], engines)
        ranks = np.array(holders.groups[group])
        # Cuts over two turns, so that the line need not be wrapped at its end.
        cuts = np.concatenate([shares[group].cumsum(), 1.0 + shares[group].cumsum()])
        cuts[len(ranks) - 1] = 1.0
        cuts[-1] = np.inf
        ends = bucket * TURN % 1.0 + size.cumsum() / size.sum()
        starts = ends - size / size.sum()
        first = np.searchsorted(cuts, starts, side="right")
        last = np.searchsorted(cuts, ends, side="right")
        moved["source"][line] = ranks[np.searchsorted(cuts, (starts + ends) / 2, side="right") % len(ranks)]
        move = line % len(plan.moved)
        for k in np.flatnonzero((first < last) & (moved["rows"][line] >= 2 * least[move])).tolist():
            fractions = (cuts[first[k] : last[k]] - starts[k]) / (ends[k] - starts[k])
            rows = int(moved["rows"][line[k]])
            parts = _divided(rows, fractions.tolist(), int(unit[move[k]]), int(least[move[k]]), int(first[k]))
            if len(parts) > 1:
                undivided[line[k]] = False
                divided += [(line[k], row, count, ranks[sender % len(ranks)]) for row, count, sender in parts]
    if not divided:
        return moved
    index, row, rows, sender = np.array(divided, dtype=np.int64).T
    parts = moved[index]
    parts["source_row"] += row * parts["source_step"]
    parts["row"] += row * parts["row_step"]
    parts["rows"] = rows
    parts["source"] = sender
    return np.concatenate([moved[undivided], parts])


def _lines(plan: Plan, holders: Holders, chosen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields the moves of one engine, by index, for each group of holders that is `chosen` [groups] and each bucket."""
    group = holders.of
    order = np.flatnonzero(chosen[group])
    order = order[np.lexsort((order, plan.moved["bucket"][order], group[order]))]
    keys = group[order].astype(np.int64) * plan.count + plan.moved["bucket"][order]
    edges = np.flatnonzero(np.diff(keys, prepend=-1, append=-1)).tolist()
    for start, stop in pairwise(edges):
        yield *divmod(int(keys[start]), plan.count), order[start:stop]


def _divided(rows: int, fractions: Sequence[float], unit: int, least: int, first: int) -> list[tuple[int, int, int]]:
    """Returns (first row, rows, holder) of the parts of a move that is cut at these `fractions` of its length, in
    multiples of `unit` and `least` rows or more; holder `first` has the first part, and each next holder the next one.
    """
    edges = [0]
    senders = [first]
    for holder, fraction in enumerate(fractions, first + 1):
        row = round(fraction * rows / unit) * unit
        if row - edges[-1] >= least and rows - row >= least:
            edges.append(row)
            senders.append(holder)
        elif row - edges[-1] <= rows - row:  # too little for the holder before this cut
            senders[-1] = holder
    parts = []
    for (row, end), sender in zip(pairwise([*edges, rows]), senders, strict=True):
        parts.append((row, end - row, sender))
    return parts
