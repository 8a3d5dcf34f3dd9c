"""A range of a parameter is cut into boxes that hold it once, in its order."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from slimx.trainer.checkpoint.pieces import boxes


def elements(shape: tuple[int, ...], start: int, end: int) -> torch.Tensor:
    """Returns the numbers of the elements in the boxes, one box after the other."""
    numbers = torch.arange(prod(shape)).view(shape)
    parts = [
        numbers[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in boxes(shape, start, end)
    ]
    return torch.cat(parts) if parts else torch.arange(0)


@pytest.mark.parametrize("shape", [(), (1,), (17,), (1, 9), (9, 1), (4, 6), (1, 3, 5), (3, 2, 4), (2, 3, 1, 4)])
def test_boxes_hold_a_range_of_any_tensor_once_and_in_order(shape):
    count = prod(shape)
    for start in range(count + 1):
        for end in range(start, count + 1):
            assert elements(shape, start, end).tolist() == list(range(start, end))


def test_there_are_no_more_boxes_than_a_range_needs():
    random.seed(3)
    for _ in range(300):
        shape = tuple(random.randint(1, 6) for _ in range(random.randint(1, 4)))
        start, end = sorted(random.randint(0, prod(shape)) for _ in range(2))
        assert len(list(boxes(shape, start, end))) <= 2 * len(shape) - 1
    assert list(boxes((4, 6), 0, 24)) == [((0, 0), (4, 6))], "whole rows are one box"
    assert list(boxes((4, 6), 8, 20)) == [((1, 2), (1, 4)), ((2, 0), (1, 6)), ((3, 0), (1, 2))]
