"""Splits work into parts of nearly equal cost: number partitioning."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Parts = list[list[int]]
"""Indices of the items of each part, ascending; every item is in exactly one part."""
DIFFERENCED = 2**22
"""Items x parts up to which differencing is worth its time: a second there, and with so many items greedy is close."""


def balance(costs: Sequence[float], parts: int) -> Parts:
    """`parts` lists of indices of nearly equal total cost: the better of differencing and greedy.

    Differencing is usually several times closer to equal, but on some inputs greedy's heaviest part is lighter, and the
    heaviest part is what everyone waits for. With as many items as parts or more, and positive costs, no part is empty.
    Beyond `DIFFERENCED` greedy stands alone.
    """
    if len(costs) * parts > DIFFERENCED:
        return greedy(costs, parts)
    return min((differencing(costs, parts), greedy(costs, parts)), key=lambda split: heaviest(costs, split))


def heaviest(costs: Sequence[float], split: Parts) -> float:
    """Total cost of the heaviest part."""
    return max(sum(costs[i] for i in part) for part in split)


def greedy(costs: Sequence[float], parts: int) -> Parts:
    """Longest first, each to the lightest part (Graham 1969)."""
    split = greedy_with_room(costs, [0] * len(costs), parts, 0)
    assert split is not None, "items of no size fit everywhere"
    return split


def greedy_with_room(costs: Sequence[float], sizes: Sequence[int], parts: int, limit: int) -> Parts | None:
    """Balance greedily, each item in the lightest part whose total of `sizes` stays within `limit`; None if one fits
    nowhere."""
    split: Parts = [[] for _ in range(parts)]
    used = [0] * parts
    heap = [(0.0, 0, part) for part in range(parts)]  # cost, number of items, part
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while heap and used[heap[0][2]] + sizes[index] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, count, part = heap[0]
        heapq.heapreplace(heap, (cost + costs[index], count + 1, part))
        split[part].append(index)
        used[part] += sizes[index]
        for entry in full:
            heapq.heappush(heap, entry)
    return [sorted(part) for part in split]


def differencing(costs: Sequence[float], parts: int) -> Parts:
    """The largest differencing method for several parts (Karmarkar and Karp 1982, "The differencing method of set
    partitioning"; for more than two parts: Michiels, Korst and Aarts 2003).

    It begins with one partial split per item: the item alone, all other parts empty. Again and again it takes the two
    splits whose heaviest and lightest parts differ most and joins them, the heaviest part of the one with the lightest
    of the other. Only what exceeds the lightest part is kept as a cost: a part that all share changes nothing.
    """
    # A split: its parts, heaviest first, without empty ones; a part: (cost, items).
    heap = [(-cost, number, [(cost, [number])]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):  # numbers break ties, so that the result is always the same
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        overlap = max(0, len(first) + len(second) - parts)
        alone = len(first) - overlap
        joined = first[:alone] + second[: len(second) - overlap]
        for (cost, items), (other, more) in zip(first[alone:], reversed(second), strict=False):
            joined.append((cost + other, items + more))
        joined.sort(key=lambda part: (-part[0], part[1][0]))
        if len(joined) == parts:
            lightest = joined[-1][0]
            joined = [(cost - lightest, items) for cost, items in joined]
        heapq.heappush(heap, (-joined[0][0], number, joined))
    found = sorted(sorted(items) for _, items in heap[0][2]) if heap else []
    return found + [[] for _ in range(parts - len(found))]
