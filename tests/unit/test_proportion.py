"""A growth of times is seen, and one that a loaded machine made is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.unit.proportion import TIMES, grows


@pytest.mark.parametrize(
    ("short", "long", "verdict"),
    [
        ([1.0] * TIMES, [8.0] * TIMES, True),
        ([1.0] * TIMES, [7.9] * TIMES, False),
        ([1.0] * TIMES, [8.0] * (TIMES - 1) + [4.0], False),
        ([1.0] * (TIMES - 1) + [2.0], [8.0] * TIMES, False),
        ([0.0] * TIMES, [0.7] * TIMES, False),
        ([0.0] * TIMES, [0.8] * TIMES, True),
    ],
    ids=["grows", "just not", "long once", "short once", "noise", "beyond noise"],
)
def test_a_growth_is_one_in_every_measurement(short: Sequence[float], long: Sequence[float], verdict: bool) -> None:
    shorts: Iterator[float] = iter(short)
    longs: Iterator[float] = iter(long)
    assert grows(lambda: next(shorts), lambda: next(longs), 8, 0.1) is verdict
