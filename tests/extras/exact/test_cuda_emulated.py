"""The CUDA kernels of exact mode, their own source run by threads of the CPU, give the bits of the torch operations.

So the binding, the tiles, the barriers and the order of operations are tested without a GPU
(exact_emulation/exact_device.cuh says what is not); tests/gpu/test_numerics.py runs them on one.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimx.extras.exact.operations.contract import fingerprint
from slimx.extras.exact.operations.forward import kernel_cuda, reference
from slimx.extras.exact.operations.forward.reference import Gathered
from slimx.extras.exact.ordered.reference import product
from tests.extras.exact.batches import check_attention, check_rows
from tests.extras.exact.stand import DTYPES, assert_same_bits, values
from tests.refusals import refused
from tests.unit.emulation import CSRC, PATIENT, library

EMULATION = Path(__file__).with_name("exact_emulation")
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def emulator_library() -> Path:
    sources = (*CSRC.glob("exact*"), CSRC / "arithmetic.h", CSRC / "intrinsics.h", *EMULATION.iterdir())
    return library(CSRC / "exact.cu", sources, "-O1", "-std=c++20", PATIENT)


@pytest.fixture(autouse=True)
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs kernels on an emulated device, whose tensors are those of the CPU."""
    monkeypatch.setattr(kernel_cuda.ordered, "LIBRARY", emulator_library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (34, 33, 70), (0, 4, 8)])
def test_the_product_of_adapters(rows: int, columns: int, width: int) -> None:
    x, weight = (values(*shape, dtype=torch.float32, seed=9) for shape in ((rows, width), (columns, width)))
    assert_same_bits(kernel_cuda.ordered.product(x, weight), product(x, weight))


@both_dtypes
@pytest.mark.parametrize(
    ("columns", "width", "leaves", "counts"),
    [(5, 7, 1, [3, 0, 34]), (70, 64, 2, [65, 0, 2]), (33, 330, 2, [2, 0, 9]), (40, 100, 4, [0, 16, 3])],
    ids=["a tile in part", "tiles", "few rows", "as many as are few"],
)
def test_linear(dtype: torch.dtype, columns: int, width: int, leaves: int, counts: list[int]) -> None:
    for size in (1.0, 1e-19):
        x = values(sum(counts), width, dtype=dtype, seed=1, size=size)
        weights = [values(columns, width, dtype=dtype, seed=seed, size=size) for seed in (2, 3, 4)]
        for out in DTYPES:
            expected = reference.linear(x, weights, counts, leaves, out)
            assert_same_bits(kernel_cuda.linear(x, weights, counts, leaves, out), expected, (size, out))


@both_dtypes
@pytest.mark.parametrize("width", [2, 30, 1500, 3000])
def test_row_operations(dtype: torch.dtype, width: int) -> None:
    x, weight = values(3, width, dtype=dtype, seed=1, size=8.0), values(width, dtype=dtype, seed=2)
    temperature = torch.tensor([1.0, 0.7, 0.3])
    assert_same_bits(kernel_cuda.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert_same_bits(kernel_cuda.silu_and_mul(x), reference.silu_and_mul(x))
    found, expected = (made.log_normalizer(x, temperature) for made in (kernel_cuda, reference))
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1])


@both_dtypes
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "d", "dv", "slots"),
    [(4, 4, 2, 24, 40, 300), (3, 2, 1, 64, 70, 130), (5, 4, 4, 5, 3, 17), (3, 20, 1, 140, 132, 40)],
)
@pytest.mark.parametrize("sequences", [1, 2, None], ids=["one sequence", "two sequences", "rows apart"])
def test_attention(
    sequences: int | None,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    groups: int,
    d: int,
    dv: int,
    slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = torch.Generator().manual_seed(3)
    query, key = values(rows, heads, d, dtype=dtype, seed=4), values(slots, groups, d, dtype=dtype, seed=5)
    value, index = values(slots, groups, dv, dtype=dtype, seed=6), torch.randperm(slots, generator=dice).int()
    length = torch.randint(1, slots + 1, (rows,), generator=dice)
    begin = (torch.rand(rows, generator=dice) * (slots - length + 1)).long()
    if sequences is not None:  # their rows read the same keys, as far as each one's length goes
        begin = begin[torch.arange(rows) * sequences // rows]
        length = torch.minimum(length, slots - begin)
    row = int(length.argmax())  # who does not see its last key must not see that its value is infinite
    value[index[begin[row] + length[row] - 1].long()] = math.inf
    monkeypatch.setattr(kernel_cuda, "_MOST_SCORES", 2 * heads * slots)  # rows in parts of about two
    for sinks in (None, values(heads, dtype=torch.float32, seed=7)):
        call = (query, Gathered(key, value, index, begin, length), 0.3, sinks)
        assert_same_bits(kernel_cuda.attend(*call), reference.attend(*call), sinks is None)


@both_dtypes
def test_all_operations_are_those_of_the_contract(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs them as engine and trainer do: the checks of tests/gpu/test_numerics.py, and the attested digest."""
    attested = fingerprint(dtype)
    monkeypatch.setattr("slimx.extras.exact.operations.forward.kernel", kernel_cuda)
    monkeypatch.setattr("slimx.extras.exact.ordered._has_kernels", lambda: True)
    check_rows(dtype, "cpu", 23)
    check_attention(dtype, "cpu")
    assert fingerprint.__wrapped__(dtype) == attested


def test_limits_of_the_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cuda, "MOST_WIDTH", 10)
    with refused("exact.width", about="11"):
        kernel_cuda.rms_norm(torch.ones(1, 11), torch.ones(11), 1e-6)
    with refused("exact.dtype", about="torch.float16"):
        kernel_cuda.silu_and_mul(torch.ones(1, 8, dtype=torch.float16))
    monkeypatch.setattr(kernel_cuda.ordered, "LIBRARY", tmp_path / "libslimx_exact_cuda.so")
    with refused("library.missing", about=str(tmp_path / "libslimx_exact_cuda.so")):
        kernel_cuda.silu_and_mul(torch.ones(1, 8))
