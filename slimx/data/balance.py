"""Splits items with costs into parts of nearly equal total cost (number partitioning)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Parts = list[list[int]]
"""Indices of each part's items, ascending; every item is in exactly one part."""
DIFFERENCED = 2**22
"""Maximum product of the numbers of items and parts for which `balance` also tries `differencing`, which takes about a
second at this size. With more items, the parts of `greedy` alone are nearly equal."""


def balance(costs: Sequence[float], parts: int) -> Parts:
    """Splits items into `parts` lists of indices with nearly equal total cost: returns the better result of
    `differencing` and `greedy`. `costs`: cost of each item.

    Differencing usually balances several times better, but on some inputs greedy's heaviest part, which determines the
    time, is lighter. If there are at least as many items as parts, and all costs are positive, no part is empty. If
    items x parts exceeds `DIFFERENCED`, only greedy is used.
    """
    if len(costs) * parts > DIFFERENCED:
        return greedy(costs, parts)
    return min((differencing(costs, parts), greedy(costs, parts)), key=lambda split: heaviest(costs, split))


def heaviest(costs: Sequence[float], split: Parts) -> float:
    """Returns the total cost of the heaviest part of `split`. `costs`: cost of each item."""
    return max(total(costs, part) for part in split)


def total(costs: Sequence[float], part: Iterable[int]) -> float:
    """Returns the total cost of the items whose indices are in `part`."""
    return sum(costs[i] for i in part)


def greedy(costs: Sequence[float], parts: int) -> Parts:
    """Splits items into `parts` lists of indices: each item, the costliest first, goes to the part with the lowest
    total so far (Graham 1969)."""
    split = greedy_with_room(costs, [0] * len(costs), parts, 0)
    assert split is not None, "items of size 0 fit in every part"
    return split


def greedy_with_room(costs: Sequence[float], sizes: Sequence[int], parts: int, limit: int) -> Parts | None:
    """Splits items into `parts` lists of indices as `greedy` does, but limits the total size of each part.

    Each item, the costliest first, goes to the part with the lowest total cost among those whose total of `sizes` stays
    within `limit`. Returns None if an item fits in no part."""
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
    """Splits items into `parts` lists of indices by the largest differencing method (Karmarkar and Karp 1982, "The
    differencing method of set partitioning"; for more than two parts: Michiels, Korst and Aarts 2003).

    The method starts with one partial split per item: the item in one part, all other parts empty. It repeatedly joins
    the two splits with the largest differences between their heaviest and lightest parts: the heaviest part of one is
    joined with the lightest of the other. Costs are stored relative to the lightest part, because adding the same cost
    to all parts changes nothing.
    """
    # A split is a list of non-empty parts, heaviest first; a part is (cost, items).
    heap = [(-cost, index, [(cost, [index])]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    for index in range(len(costs), 2 * len(costs) - 1):  # the index breaks ties, which makes the result reproducible
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
        heapq.heappush(heap, (-joined[0][0], index, joined))
    split: Parts = []
    if heap:
        split = sorted(sorted(items) for _, items in heap[0][2])
    return split + [[] for _ in range(parts - len(split))]
