"""The kernels of exact mode give the bits of the torch operations: every instruction set, dtype, odd size and thread.

The torch operations are held against torch's own in test_operations.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slimx.extras.exact.operations.forward import kernel, reference
from slimx.extras.exact.operations.forward.reference import Gathered
from slimx.extras.exact.ordered.kernel import isas, load
from tests.extras.exact.stand import DTYPES, assert_same_bits, bits, values
from tests.refusals import refused

ISAS = isas()
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_this_processor_has_kernels() -> None:
    assert "scalar" in ISAS


@both_dtypes
@pytest.mark.parametrize(
    ("rows", "columns", "width", "leaves"),
    [(1, 5, 7, 1), (3, 17, 33, 1), (4, 40, 64, 2), (8, 16, 32, 1), (9, 33, 100, 4), (17, 50, 96, 1), (40, 19, 128, 8)],
)
def test_linear(dtype: torch.dtype, rows: int, columns: int, width: int, leaves: int) -> None:
    # 1e-19: products about the least normal number, where denormals count as zeros until the leaves meet.
    for size in (1.0, 1e-19):
        x, weight = values(rows, width, dtype=dtype, seed=1, size=size), values(columns, width, dtype=dtype, seed=2)
        weight = (weight * size).to(dtype)
        for out in DTYPES:
            expected = reference.linear(x, [weight], [rows], leaves, out)
            assert len(expected.unique()) > 1
            for isa in ISAS:
                assert_same_bits(kernel.linear(x, [weight], [rows], leaves, out, isa=isa), expected, (size, out, isa))


@both_dtypes
def test_linear_of_many_rows_and_columns_is_that_of_each_part(dtype: torch.dtype) -> None:
    """Covers more than one tile in both directions: parts are in other tiles, and few rows have a different layout."""
    x, weight = values(300, 70, dtype=dtype, seed=1), values(150, 70, dtype=dtype, seed=2)
    expected = kernel.linear(x, [weight], [300], 1, torch.float32, isa="scalar")
    for isa in ISAS:
        whole = kernel.linear(x, [weight], [300], 1, torch.float32, isa=isa)
        assert_same_bits(whole, expected, isa)
        part = kernel.linear(x[290:293], [weight[100:139]], [3], 1, torch.float32, isa=isa)
        assert_same_bits(part, whole[290:293, 100:139], isa)


@both_dtypes
def test_linear_by_expert(dtype: torch.dtype) -> None:
    x, weights, counts = values(20, 40, dtype=dtype, seed=1), values(4, 24, 40, dtype=dtype, seed=2), [3, 0, 12, 5]
    expected = reference.linear(x, list(weights), counts, 1, dtype)
    for isa in ISAS:
        assert_same_bits(kernel.linear(x, list(weights), counts, 1, dtype, isa=isa), expected, isa)


def test_bf16_linear_has_the_bits_of_the_fp32_one() -> None:
    x, weight = values(20, 100, dtype=torch.bfloat16, seed=1), values(30, 100, dtype=torch.bfloat16, seed=2)
    expected = kernel.linear(x.float(), [weight.float()], [20], 1, torch.float32)
    for isa in ISAS:
        assert_same_bits(kernel.linear(x, [weight], [20], 1, torch.float32, isa=isa), expected, isa)


@both_dtypes
@pytest.mark.parametrize("width", [2, 30, 64, 1024, 1500, 2500])
def test_row_operations(dtype: torch.dtype, width: int) -> None:
    x, weight = values(5, width, dtype=dtype, seed=1, size=8.0), values(width, dtype=dtype, seed=2)
    temperature = torch.tensor([1.0, 0.7, 0.3, 1.3, 2.0])
    most, log_sum = reference.log_normalizer(x, temperature)
    for isa in ISAS:
        assert_same_bits(kernel.rms_norm(x, weight, 1e-6, isa=isa), reference.rms_norm(x, weight, 1e-6), isa)
        assert_same_bits(kernel.silu_and_mul(x, isa=isa), reference.silu_and_mul(x), isa)
        found = kernel.log_normalizer(x, temperature, isa=isa)
        assert_same_bits(found[0], most, isa)
        assert_same_bits(found[1], log_sum, isa)


def test_exp_of_every_kind_of_number() -> None:
    """Uses silu, whose gate over e^-gate shows every bit of it."""
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 87.3, 87.34, -88.7, -88.73, 1e9, -1e9, torch.inf, torch.nan])
    gates = torch.cat((special, torch.linspace(-90, 90, 20000)))
    x = torch.stack((gates, torch.ones_like(gates)), dim=1).reshape(1, -1, 2).transpose(1, 2).reshape(1, -1)
    expected = reference.silu_and_mul(x)
    for isa in ISAS:
        found = kernel.silu_and_mul(x, isa=isa)
        assert torch.equal(found.isnan(), expected.isnan())
        assert_same_bits(found.nan_to_num(7.0), expected.nan_to_num(7.0), isa)


@both_dtypes
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "d", "dv", "slots"),
    [(4, 4, 2, 24, 40, 300), (7, 2, 2, 16, 16, 9), (3, 6, 1, 64, 64, 130), (5, 4, 4, 5, 3, 17), (2, 8, 1, 96, 64, 40)],
)
def test_attention(dtype: torch.dtype, rows: int, heads: int, groups: int, d: int, dv: int, slots: int) -> None:
    dice = torch.Generator().manual_seed(3)
    query, key = values(rows, heads, d, dtype=dtype, seed=4), values(slots, groups, d, dtype=dtype, seed=5)
    value = values(slots, groups, dv, dtype=dtype, seed=6)
    index = torch.randperm(slots, generator=dice).int()
    length = torch.randint(1, slots + 1, (rows,), generator=dice)
    begin = (torch.rand(rows, generator=dice) * (slots - length + 1)).long()
    for sinks in (None, values(heads, dtype=torch.float32, seed=7)):
        call = (query, Gathered(key, value, index, begin, length), 0.3, sinks)
        expected = reference.attend(*call)
        for isa in ISAS:
            assert_same_bits(kernel.attend(*call, isa=isa), expected, (isa, sinks is None))


@both_dtypes
def test_bits_do_not_depend_on_threads_or_rounding_of_denormals(dtype: torch.dtype, threads: None) -> None:
    """Changes the program's treatment of denormals, which the kernels must override."""
    x, weight = values(256, 256, dtype=dtype, seed=1), values(512, 256, dtype=dtype, seed=2)
    query, key = values(64, 8, 32, dtype=dtype, seed=3), values(64, 2, 32, dtype=dtype, seed=4)
    place = torch.arange(64)
    small, least = (weight.float() * 1e-38).to(dtype), (key.float() * 1e-38).to(dtype)

    def everything() -> list[torch.Tensor]:
        return [
            kernel.linear(x, [weight], [256], 4, dtype),
            kernel.rms_norm(x, small[0, :256], 1e-6),
            kernel.silu_and_mul(small),
            *kernel.log_normalizer(weight, torch.ones(512)),
            kernel.attend(query, Gathered(key, least, place.int(), 0 * place, place + 1), 1.0, None),
        ]

    torch.set_num_threads(1)
    alone = everything()
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    try:
        together = everything()
    finally:
        torch.set_flush_denormal(False)
    for k, (found, expected) in enumerate(zip(together, alone, strict=True)):
        assert_same_bits(found, expected, k)
    assert any((bits(t.float().abs()) < 0x00800000).logical_and(t != 0).any() for t in alone)  # denormals were there


def test_unsupported_operands_are_refused_by_name(tmp_path: Path) -> None:
    x = torch.ones(2, 32)
    with refused("exact.dtype", about="torch.float16"):
        kernel.silu_and_mul(x.half())
    with refused("exact.weights"):
        kernel.linear(x, [x, x[:1]], [1, 1], 1, torch.float32)
    with refused("library.missing", about=str(tmp_path / "libslimx_exact.so")):
        load(tmp_path / "libslimx_exact.so")
