"""Splits work into parts of nearly equal size."""

from __future__ import annotations

from collections.abc import Sequence


def balance(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices split into `parts` lists of nearly equal total size: longest first, each to the lightest list."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    totals, out = [0] * parts, [[] for _ in range(parts)]
    for index in order:
        lightest = min(range(parts), key=lambda p: (totals[p], len(out[p]), p))
        out[lightest].append(index)
        totals[lightest] += sizes[index]
    return out
