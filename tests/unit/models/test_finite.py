"""NaN and infinities among weights are refused, however the values lie, and large finite ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slimx.models.files.reader import check_finite
from tests.refusals import refused

PLACES = {
    "whole": lambda x: x,
    "turned": lambda x: x.T,
    "columns": lambda x: x[:, 1:],
    "every second": lambda x: x[::2],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", PLACES)
def test_nan_weights_are_refused_but_not_overflowing_sums(place: str, dtype: torch.dtype):
    values = torch.full((4, 6), torch.finfo(dtype).max, dtype=dtype)
    check_finite(PLACES[place](values), "w", Path("model"))
    for odd in (float("nan"), float("inf"), float("-inf")):
        values[2, 3] = odd
        values[0, 3] = -odd  # their sum is NaN
        with refused("checkpoint.finite", about="w"):
            check_finite(PLACES[place](values), "w", Path("model"))


def test_an_empty_part_of_a_tensor_is_finite():
    check_finite(torch.empty(0, 4), "w", Path("model"))
    check_finite(torch.empty(4, 0)[::2], "w", Path("model"))
