"""Decides which trainer rank sends which bytes to which rank of every engine, so that the load is balanced.

A compiled plan contains, for one engine, the moves and the ranks that have their bytes (`Plan.holders`, the holders).
This module chooses senders for all engines together, in two steps:

    share   All bytes with the same holders form one amount. Amounts are distributed over their holders until the
            busiest rank sends the fewest bytes that the layouts allow.
    cut     The moves of one amount and bucket are placed on a line, which is cut in proportion to these shares
            (McNaughton, "Scheduling with deadlines and loss functions", 1959). A large move that crosses a cut is
            divided by rows. The line of the next bucket starts at a different offset, so that undivided moves rotate
            over the holders.

The moves to different engines follow each other on the line, so replicas of an engine receive the same bytes from
different ranks. How many bytes a rank receives depends only on the layouts.

Only the ranks of one pipeline stage hold the layers in a bucket, so replicas may be staggered: each starts at another
bucket and continues in the same order (`Spread.turns`). At any time, they then receive from all stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import psutil

from slimx.errors import SlimxError
from slimx.extras.direct.wire import move_bytes, quantized_moves
from slimx.reshard.plan.copy_plan import Bucket, Holders, Plan

GRAIN = 2**18
"""Minimum size in bytes of each part into which a move is divided."""
CLOSE = 1e-3
"""Convergence criterion of `share`: maximum change in any rank's bytes during one sweep over all amounts, relative to
the busiest rank's bytes."""
SWEEPS = 200
"""Maximum number of iterations of `share`, each a sweep over all amounts."""
BYTES = 165
"""Maximum amount of host memory, in bytes, that `deal` needs per move and engine, measured in test_dealing.py."""
TURN = (5**0.5 - 1) / 2
"""Fraction by which each bucket's line of moves, which is cut among the senders, is rotated relative to that of the
previous bucket. The value is the fractional part of the golden ratio, whose multiples are evenly distributed modulo
1."""


def deal(plan: Plan, *, engines: int = 1, grain: int = GRAIN, turns: Sequence[int] = ()) -> Plan:
    """Returns `plan`, which sends to one engine, extended to `engines` replicas of the engine, with a sender chosen for
    every move.

    Rank r of engine e is target e * plan.targets + r. `grain`: minimum size in bytes of each part of a divided move.
    `turns`: as in `Spread`; empty if all engines receive the buckets in the order of `plan`. The same inputs give the
    same plan. Raises SlimxError if the plan has no holders or host memory does not suffice."""
    if plan.holders is None:
        raise SlimxError(
            "the plan was deserialized, so it does not list the ranks that hold each parameter, and its moves "
            "cannot be divided among engines; compile the plan again with compile_plan",
            code="dealing.holders",
            about="plan",
        )
    needed = len(plan.moved) * engines * BYTES
    free = psutil.virtual_memory().available
    if needed > free:
        raise SlimxError(
            f"distributing {len(plan.moved)} moves to {engines} engines needs {needed / 2**30:.0f} GiB of host "
            f"memory, but only {free / 2**30:.0f} GiB are free; lower rollout.engines.count, or use a machine with "
            "more memory",
            code="dealing.memory",
            about="rollout.engines.count",
        )
    nbytes = move_bytes(plan)
    amounts = np.bincount(plan.holders.of, weights=nbytes, minlength=len(plan.holders.groups)) * engines
    shares = share(amounts, plan.holders.groups)
    turns = turns or [0] * engines
    moved = _cut(plan, plan.holders, nbytes, shares, turns, grain)
    order = np.lexsort((moved["row"], moved["tensor"], moved["target"], moved["source"], moved["bucket"]))
    buckets: list[list[Bucket]] = []
    for turn in turns:
        if turn:
            buckets += [target[turn:] + target[:turn] for target in plan.buckets]
        else:  # replicas share one list of buckets
            buckets += plan.buckets
    return Plan(plan.precision, plan.parameters, buckets, moved[order], plan.unread)


class Spread(NamedTuple):
    """Replicas of an engine among which `deal` spreads a plan, and their receivers."""

    turns: list[int]
    """For each replica, the bucket of the plan that it receives first; bucket b of the dealt plan is for this replica
    bucket (b + turn) modulo the number of buckets."""
    edges: list[int]
    """First target of each receiver in the dealt plan, followed by the total number of targets."""

    def deal(self, plan: Plan) -> Plan:
        """Returns `plan` dealt among the replicas (`deal`)."""
        return deal(plan, engines=len(self.turns), turns=self.turns)


def spread_of(plan: Plan, receivers: Sequence[int], *, staggered: bool = False) -> Spread:
    """Returns the replicas and receivers for a plan that sends to one engine.

    `receivers`: number of receivers of each engine. The targets of an engine's ranks are divided among its receivers; a
    single target for all ranks (Hugging Face names) is sent to each receiver, which counts as a replica. `staggered`:
    True if engines start at different buckets, evenly distributed over the plan."""
    turns: list[int] = []
    edges: list[int] = []
    for engine, count in enumerate(receivers):
        turn = engine * plan.count // len(receivers) if staggered else 0
        copies = count if plan.targets == 1 else 1
        first = len(turns) * plan.targets
        edges += [first + index * copies * plan.targets // count for index in range(count)]
        turns += [turn] * copies
    return Spread(turns, [*edges, len(turns) * plan.targets])


def only(plan: Plan, target: int) -> Plan:
    """Restricts `plan` to the moves that fill `target`, which becomes target 0 of the returned plan."""
    moved = plan.moved[plan.moved["target"] == target].copy()
    moved["target"] = 0
    return Plan(plan.precision, plan.parameters, [plan.buckets[target]], moved)


def share(amounts: np.ndarray, holders: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Returns for each amount the fraction that each of its holders sends; the fractions of an amount sum to 1.

    `amounts`: size in bytes of each amount, [len(holders)]. Repeatedly distributes each amount anew over its holders,
    given the ranks' load from the other amounts, until the loads converge. This minimizes the sum of squares over
    ranks, and thereby the number of bytes that the busiest rank sends."""
    load = np.zeros(1 + max((ranks[-1] for ranks in holders), default=0))
    poured = [np.zeros(len(ranks)) for ranks in holders]
    # Amounts with the fewest holders come first, because they have the least choice.
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
    """Returns the part of `amount` that is assigned to each rank if `amount` is distributed so that the ranks' total
    loads become as equal as possible. `load`: bytes that each rank already sends; ranks whose load exceeds the
    resulting common load are assigned nothing."""
    low = np.sort(load)
    level = (amount + low.cumsum()) / np.arange(1, len(low) + 1)
    # Filling the k least loaded ranks to a common level is right if that level is below the load of rank k + 1.
    count = np.flatnonzero(np.append(low[1:], np.inf) >= level)[0]
    return np.maximum(level[count] - load, 0.0)


def _cut(
    plan: Plan, holders: Holders, nbytes: np.ndarray, shares: list[np.ndarray], turns: Sequence[int], grain: int
) -> np.ndarray:
    """Returns the moves to all engines, an array [moves] of dtype `MOVE`, with their senders. A move that several ranks
    send is divided into several moves.

    `nbytes`: size in bytes of each move of `plan`. `shares`: for each group of holders, the fraction of its bytes that
    each holder sends. `turns`: as in `Spread`. `grain`: minimum size in bytes of a part of a divided move."""
    engines = len(turns)
    moved = np.tile(plan.moved, engines)
    moved["target"] += np.repeat(np.arange(engines, dtype=np.int32) * plan.targets, len(plan.moved))
    moved["bucket"] = (moved["bucket"] - np.repeat(np.array(turns, dtype=np.int32), len(plan.moved))) % plan.count
    group_of = np.tile(holders.of, engines)
    moved["source"] = np.array([ranks[0] for ranks in holders.groups], dtype=np.int32)[group_of]
    # Rows of a quantization block stay together, because the rank that packs the block computes its scale.
    high = plan.precision.quantization.block[0] if plan.precision.quantization else 1
    unit = np.where(quantized_moves(plan), high, 1)
    least = -(-grain * plan.moved["rows"].astype(np.int64) // np.maximum(nbytes, 1))
    least = -(-np.maximum(least, 1) // unit) * unit
    divided: list[tuple[int, int, int, int]] = []
    """(index of a move, first row, number of rows, sender) of each part of a divided move."""
    undivided = np.ones(len(moved), dtype=bool)
    chosen = np.array([len(parts) > 1 for parts in shares])
    for group, bucket, line in _lines(group_of, moved["bucket"], plan.count, chosen):
        move = line % len(plan.moved)
        size = nbytes[move]
        ranks = np.array(holders.groups[group])
        # The cuts are repeated once, because a rotated line extends past 1.
        cuts = np.concatenate([shares[group].cumsum(), 1.0 + shares[group].cumsum()])
        cuts[len(ranks) - 1] = 1.0
        cuts[-1] = np.inf
        ends = bucket * TURN % 1.0 + size.cumsum() / size.sum()
        starts = ends - size / size.sum()
        first = np.searchsorted(cuts, starts, side="right")
        last = np.searchsorted(cuts, ends, side="right")
        moved["source"][line] = ranks[np.searchsorted(cuts, (starts + ends) / 2, side="right") % len(ranks)]
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


def _lines(
    group: np.ndarray, bucket: np.ndarray, count: int, chosen: np.ndarray
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (index of a group of holders, bucket, indices of the group's moves in that bucket) for each group and
    bucket with moves. `group`, `bucket`: those of every move, [moves]. `count`: number of buckets. `chosen`, bool
    [groups]: True for the groups to include."""
    order = np.flatnonzero(chosen[group])
    keys = group[order].astype(np.int64) * count + bucket[order]
    by_key = np.argsort(keys, kind="stable")
    order = order[by_key]
    keys = keys[by_key]
    edges = np.flatnonzero(np.diff(keys, prepend=-1, append=-1)).tolist()
    for start, stop in pairwise(edges):
        yield *divmod(int(keys[start]), count), order[start:stop]


def _divided(rows: int, fractions: Sequence[float], unit: int, least: int, first: int) -> list[tuple[int, int, int]]:
    """Returns (first row, number of rows, holder) of each part of a move with `rows` rows that is cut at `fractions` of
    its length.

    Parts start at multiples of `unit` rows and have at least `least` rows. The first part belongs to holder `first`,
    the part after the first cut to holder `first` + 1, and so on; a part that would be too small goes to a neighbor."""
    edges = [0]
    senders = [first]
    for holder, fraction in enumerate(fractions, first + 1):
        row = round(fraction * rows / unit) * unit
        if row - edges[-1] >= least and rows - row >= least:
            edges.append(row)
            senders.append(holder)
        elif row - edges[-1] <= rows - row:  # the part before this cut is too small for its holder
            senders[-1] = holder
    parts = []
    for (row, end), sender in zip(pairwise([*edges, rows]), senders, strict=True):
        parts.append((row, end - row, sender))
    return parts
