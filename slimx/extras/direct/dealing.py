"""Dealing: which trainer rank sends which bytes to which rank of every engine; none sends more than it must.

A compiled plan says, for one engine, what goes where and who holds it (`Plan.holders`). Here senders are chosen anew
for all engines together, in two steps:

    share   bytes that the same ranks hold are one amount. Amounts are poured over their holders until no rank can be
            relieved by another: the least bytes of the busiest rank that the layouts allow.
    cut     the moves of one amount and bucket lie on a line that is cut by these shares (McNaughton, "Scheduling with
            deadlines and loss functions", 1959); a large move that lies across a cut is divided by rows. The line of
            the next bucket starts elsewhere, so that what is not divided falls on each holder in turn.

Engines follow one another on the line: those that are copies of one another take the same bytes from different ranks.
What a rank receives is the layouts' alone, and is not dealt out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import psutil

from slimx.errors import SlimxError
from slimx.extras.direct.wire import move_bytes, quantised_moves
from slimx.reshard.plan.copy_plan import Holders, Plan

GRAIN = 2**18
"""Bytes: no move is divided into parts that are smaller."""
CLOSE, SWEEPS = 1e-3, 200
"""Sharing ends when a sweep over all amounts changes no rank by this part of its bytes, or after so many sweeps."""
BYTES = 165
"""Most bytes of host memory that dealing takes for a move of one engine, measured in test_dealing.py."""
TURN = (5**0.5 - 1) / 2
"""Part of its length by which the line of a bucket is turned against the one before: multiples of it fall evenly."""


def deal(plan: Plan, *, engines: int = 1, grain: int = GRAIN) -> Plan:
    """`plan`, which is one engine's, for `engines` that are copies of one another: rank r of engine e is target
    e * plan.targets + r.

    `grain`: bytes below which no part of a move is cut off. The same inputs give the same plan.
    """
    if plan.holders is None:
        raise SlimxError(
            "dealing: this plan was read from bytes and does not say who holds what; compile it again",
            code="dealing.holders",
            about="plan",
        )
    needed, free = len(plan.moved) * engines * BYTES, psutil.virtual_memory().available
    if needed > free:
        raise SlimxError(
            f"dealing: {len(plan.moved)} moves to {engines} engines take {needed / 2**30:.0f} GiB of this machine's "
            f"memory, of which {free / 2**30:.0f} are free; lower rollout.engines.count, or use a machine with more",
            code="dealing.memory",
            about="rollout.engines.count",
        )
    nbytes = move_bytes(plan)
    amounts = np.bincount(plan.holders.of, weights=nbytes, minlength=len(plan.holders.groups)) * engines
    shares = share(amounts, plan.holders.groups)
    moved = _cut(plan, nbytes, shares, engines, grain)
    order = np.lexsort((moved["row"], moved["tensor"], moved["target"], moved["source"], moved["bucket"]))
    return Plan(plan.precision, plan.parameters, plan.buckets * engines, moved[order], plan.unread)


def copies_of(plan: Plan, receivers: Sequence[int]) -> tuple[int, list[int]]:
    """(Copies of `plan`, one engine's, that engines of so many `receivers` each take together; first target of each
    receiver in a plan dealt out for that many, and the end of all).

    An engine's receivers share the targets of its ranks; one target that all ranks take (Hugging Face names) goes to
    each of them."""
    if plan.targets == 1:
        return sum(receivers), list(range(sum(receivers) + 1))
    edges = [e * plan.targets + at * plan.targets // count for e, count in enumerate(receivers) for at in range(count)]
    return len(receivers), [*edges, len(receivers) * plan.targets]


def only(plan: Plan, target: int) -> Plan:
    """The part of a dealt plan that fills one target, which it has as its target 0."""
    moved = plan.moved[plan.moved["target"] == target].copy()
    moved["target"] = 0
    return Plan(plan.precision, plan.parameters, [plan.buckets[target]], moved)


def share(amounts: np.ndarray, holders: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """For each amount [holders] the part of it that each of its holders sends; parts sum to 1.

    Amounts are poured in turn, each over its holders on top of what the others have there, until nothing changes: then
    the sum of squares over ranks is least, and with it the bytes of the busiest.
    """
    load = np.zeros(1 + max((ranks[-1] for ranks in holders), default=0))
    poured = [np.zeros(len(ranks)) for ranks in holders]
    # Those with least choice first: their ranks are settled when the others come.
    order = sorted(range(len(holders)), key=lambda number: (len(holders[number]), holders[number]))
    for _ in range(SWEEPS):
        before = load.copy()
        for number in order:
            ranks = list(holders[number])
            others = load[ranks] - poured[number]
            poured[number] = _pour(others, amounts[number])
            load[ranks] = others + poured[number]
        if np.abs(load - before).max() <= CLOSE * load.max():
            break
    return [parts / parts.sum() if parts.sum() else np.full(len(parts), 1 / len(parts)) for parts in poured]


def _pour(held: np.ndarray, amount: float) -> np.ndarray:
    """The part of `amount` that each vessel gets if all are filled to one level, but for those that `held` more."""
    low = np.sort(held)
    level = (amount + low.cumsum()) / np.arange(1, len(low) + 1)
    # The level of the k lowest vessels holds if it does not reach the next one.
    count = np.flatnonzero(np.append(low[1:], np.inf) >= level)[0]
    return np.maximum(level[count] - held, 0.0)


def _cut(plan: Plan, nbytes: np.ndarray, shares: list[np.ndarray], engines: int, grain: int) -> np.ndarray:
    """The moves [more moves] of all engines, each with its sender."""
    holders: Holders = plan.holders
    moved = np.tile(plan.moved, engines)
    moved["target"] += np.repeat(np.arange(engines, dtype=np.int32) * plan.targets, len(plan.moved))
    moved["source"] = np.array([ranks[0] for ranks in holders.groups], dtype=np.int32)[np.tile(holders.of, engines)]
    # Rows that stay together: a block's scale is computed where the block is.
    high = plan.precision.quantisation.block[0] if plan.precision.quantisation else 1
    unit = np.where(quantised_moves(plan), high, 1)
    least = -(-grain * plan.moved["rows"].astype(np.int64) // np.maximum(nbytes, 1))
    least = -(-np.maximum(least, 1) // unit) * unit
    divided: list[tuple[int, int, int, int]] = []
    """Index of a move, and first row, rows and sender of a part of it."""
    whole = np.ones(len(moved), dtype=bool)
    for number, bucket, own in _lines(plan, np.array([len(parts) > 1 for parts in shares])):
        line = (own + np.arange(engines)[:, None] * len(plan.moved)).ravel()
        size, ranks = np.tile(nbytes[own], engines), np.array(holders.groups[number])
        # Cuts over two turns, so that the line need not be wrapped at its end.
        cuts = np.concatenate([shares[number].cumsum(), 1.0 + shares[number].cumsum()])
        cuts[len(ranks) - 1], cuts[-1] = 1.0, np.inf
        ends = bucket * TURN % 1.0 + size.cumsum() / size.sum()
        starts = ends - size / size.sum()
        first, last = (np.searchsorted(cuts, at, side="right") for at in (starts, ends))
        moved["source"][line] = ranks[np.searchsorted(cuts, (starts + ends) / 2, side="right") % len(ranks)]
        of = line % len(plan.moved)
        for k in np.flatnonzero((first < last) & (moved["rows"][line] >= 2 * least[of])).tolist():
            at = (cuts[first[k] : last[k]] - starts[k]) / (ends[k] - starts[k])
            rows = int(moved["rows"][line[k]])
            parts = _divided(rows, at.tolist(), int(unit[of[k]]), int(least[of[k]]), int(first[k]))
            if len(parts) > 1:
                whole[line[k]] = False
                divided += [(line[k], row, count, ranks[sender % len(ranks)]) for row, count, sender in parts]
    if not divided:
        return moved
    index, row, rows, sender = np.array(divided, dtype=np.int64).T
    parts = moved[index]
    parts["source_row"] += row * parts["source_step"]
    parts["row"] += row * parts["row_step"]
    parts["rows"], parts["source"] = rows, sender
    return np.concatenate([moved[whole], parts])


def _lines(plan: Plan, chosen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """For each group of holders that are `chosen` [groups], and each bucket: the moves of one engine, by index."""
    group = plan.holders.of
    order = np.flatnonzero(chosen[group])
    order = order[np.lexsort((order, plan.moved["bucket"][order], group[order]))]
    keys = group[order].astype(np.int64) * plan.count + plan.moved["bucket"][order]
    edges = np.flatnonzero(np.diff(keys, prepend=-1, append=-1)).tolist()
    for start, stop in pairwise(edges):
        yield *divmod(int(keys[start]), plan.count), order[start:stop]


def _divided(rows: int, at: Sequence[float], unit: int, least: int, first: int) -> list[tuple[int, int, int]]:
    """(First row, rows, holder) of the parts of a move that is cut `at` fractions of its length, in multiples of `unit`
    and `least` rows or more; holder `first` has the first part, and each next holder the next one."""
    edges, senders = [0], [first]
    for holder, fraction in enumerate(at, first + 1):
        row = round(fraction * rows / unit) * unit
        if row - edges[-1] >= least and rows - row >= least:
            edges.append(row)
            senders.append(holder)
        elif row - edges[-1] <= rows - row:  # too little for the holder before this cut
            senders[-1] = holder
    return [(row, end - row, sender) for (row, end), sender in zip(pairwise([*edges, rows]), senders, strict=True)]
