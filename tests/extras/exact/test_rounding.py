"""The specification of exact mode relies on torch operations that are correctly rounded on this very processor.

Each is held against arithmetic that rounds in one place only, `nearest`, and the last test finds any operation of the
specification that is not among those held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimx.extras.exact import operations as exact
from slimx.extras.exact.operations.contract import fingerprint
from slimx.extras.exact.operations.forward import elementary, reference

COUNT = 200_003
"""Elements: many vectors, and a rest that is computed one by one."""
PRECISION = {torch.float32: (24, -149), torch.bfloat16: (8, -133)}
"""Digits of a number, and the exponent of the smallest one."""

SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vectors": lambda x: x,
    "single elements": lambda x: x[:7],
    "every other element": lambda x: x[::2],
    "a transposed matrix": lambda x: x[:200_000].view(400, 500).t(),
}
"""Views of a tensor, for each of which torch has a different loop."""
shapes = pytest.mark.parametrize("shape", SHAPES)


def nearest(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Rounds fp64 values to `dtype`, to nearest even: [n] fp64. Computed with integers, scaled by powers of two."""
    digits, least = PRECISION[dtype]
    _, exponent = np.frexp(x)
    unit = np.maximum(exponent - digits, least)
    return torch.from_numpy(np.ldexp(np.rint(np.ldexp(x, -unit)), unit))


def spread(seed: int, least: int = -40, most: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns values with random signs and digits, exponents of two from `least` to `most`."""
    dice = np.random.default_rng(seed)
    size = np.ldexp(dice.uniform(1, 2, COUNT), dice.integers(least, most, COUNT))
    return torch.from_numpy(size * dice.choice([-1.0, 1.0], COUNT)).to(dtype)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares with `expected`, fp64."""
    wrong = found.double() != expected
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are not the nearest, as {found[wrong][0]!r}"


@shapes
def test_fp32_products_and_quotients(shape: str) -> None:
    """Uses fp64 quotients, which have more than twice the digits: rounding them again equals rounding once."""
    for low, high in ((-40, 40), (-140, -60)):  # the second: results below the least normal number
        a, b = SHAPES[shape](spread(1, low, high)), SHAPES[shape](spread(2, -8, 8))
        wide = a.contiguous().double().numpy(), b.contiguous().double().numpy()
        assert_equal(a * b, nearest(wide[0] * wide[1], torch.float32))
        assert_equal(a / b, nearest(wide[0] / wide[1], torch.float32))
        assert_equal(1.0 / b, nearest(1.0 / wide[1], torch.float32))
        assert_equal(torch.ones_like(b) / b, nearest(1.0 / wide[1], torch.float32))
        assert_equal(a * 0.7, nearest(wide[0] * float(np.float32(0.7)), torch.float32))


@shapes
def test_fp32_sums(shape: str) -> None:
    """Uses exponents so close that the sum is exact in fp64."""
    a, b = SHAPES[shape](spread(1, -12, 12)), SHAPES[shape](spread(2, -12, 12))
    wide = a.contiguous().double().numpy(), b.contiguous().double().numpy()
    assert_equal(a + b, nearest(wide[0] + wide[1], torch.float32))
    assert_equal(a - b, nearest(wide[0] - wide[1], torch.float32))
    assert_equal(a.clone().sub_(b), nearest(wide[0] - wide[1], torch.float32))
    assert_equal(1.0 - b, nearest(1.0 - wide[1], torch.float32))
    assert_equal(a + 12582912.0, nearest(wide[0] + 12582912.0, torch.float32))


@shapes
def test_bf16_sums(shape: str) -> None:
    a, b = (SHAPES[shape](spread(seed, -12, 12, torch.bfloat16)) for seed in (1, 2))
    assert_equal(a + b, nearest((a.double() + b.double()).contiguous().numpy(), torch.bfloat16))


@shapes
def test_fp32_square_roots(shape: str) -> None:
    """Checks that each root is between the midpoints to its neighbours, whose squares of 50 digits are exact in
    fp64."""
    for low, high in ((-60, 60), (-149, -126)):
        x = SHAPES[shape](spread(3, low, high).abs())
        root = elementary.sqrt(x).contiguous()
        middles = [(root.double() + torch.nextafter(root, torch.tensor(to)).double()) / 2 for to in (0.0, torch.inf)]
        assert (middles[0].square() < x.double()).all() and (x.double() < middles[1].square()).all()


@shapes
def test_fp64_operations(shape: str) -> None:
    """Compares results with Python floats, one by one."""
    a, b = (SHAPES[shape](spread(seed, -200, 200, torch.float64)) for seed in (4, 5))
    a, b = (t[: 5000 if t.dim() == 1 else 10] for t in (a, b))
    c = a * torch.where(b > 0, 1.0 + 1e-9, 1e-9)  # near a, or small beside it
    pairs = list(zip(a.flatten().tolist(), b.flatten().tolist(), c.flatten().tolist(), strict=True))
    assert (a * b).flatten().tolist() == [x * y for x, y, _ in pairs]
    assert (a / b).flatten().tolist() == [x / y for x, y, _ in pairs]
    assert (a + c).flatten().tolist() == [x + z for x, _, z in pairs]
    assert (a - c).flatten().tolist() == [x - z for x, _, z in pairs]
    small = a.clamp(-1e15, 1e15) / 3.0
    assert small.round().flatten().tolist() == [float(round(x)) for x in small.flatten().tolist()]


@shapes
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_conversions(shape: str, dtype: torch.dtype) -> None:
    """Checks that conversions round to nearest even, including halves between two numbers and numbers below the
    least."""
    for low, high in ((-100, 100), (-150, -120)):
        fine = spread(6, low, high, torch.float64)
        coarse = fine.to(torch.float32) if dtype == torch.bfloat16 else fine
        halves = coarse.view({4: torch.int32, 8: torch.int64}[coarse.element_size()])
        dropped = 16 if dtype == torch.bfloat16 else 29
        halves = ((halves >> dropped << 1 | 1) << (dropped - 1)).view(coarse.dtype)
        for source in (coarse, halves):
            x = SHAPES[shape](source)
            assert_equal(x.to(dtype), nearest(x.contiguous().double().numpy(), dtype))


ROUNDING = {
    torch.float32: {"add", "sub", "sub_", "rsub", "mul", "div", "reciprocal", "_to_copy"},
    torch.float64: {"add", "sub", "rsub", "mul", "div", "round", "sqrt", "_to_copy"},
    torch.bfloat16: {"add", "_to_copy"},
}
"""Operations that the tests above hold, by the dtype of an argument or of the result."""
EXACT = {
    *("abs", "alias", "amax", "cat", "clamp", "clone", "constant_pad_nd", "detach", "empty", "eq", "expand", "full"),
    *("full_like", "gather", "ge", "gt", "index", "index_put_", "isnan", "lift_fresh", "lt", "masked_fill"),
    *(
        "max",
        "maximum",
        "ne",
        "neg",
        "new_zeros",
        "ones_like",
        "repeat_interleave",
        "scalar_tensor",
        "scatter",
        "select",
    ),
    *("slice", "sort", "split", "split_with_sizes", "transpose", "unsqueeze", "view", "where", "zeros"),
    *("zeros_like", "arange", "minimum", "ones"),
}
"""Operations that move, choose or compare numbers and make no new ones."""


class Operations(TorchDispatchMode):
    """The operations on floating-point numbers that torch carries out inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = operation(*args, **(kwargs or {}))
        dtypes = {t.dtype for t in (*args, out) if isinstance(t, torch.Tensor) and t.is_floating_point()}
        self.found |= {(operation.name().removeprefix("aten::").split(".")[0], dtype) for dtype in dtypes}
        return out


@pytest.fixture
def specification(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch computes, and no kernel."""
    monkeypatch.setattr("slimx.extras.exact.operations.forward.kernel", reference)
    monkeypatch.setattr("slimx.extras.exact.ordered._has_kernels", lambda: True)
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


def test_the_specification_uses_no_other_operation(specification: None) -> None:
    with Operations() as operations:
        for dtype in (torch.float32, torch.bfloat16):
            fingerprint(dtype)
            x = torch.ones(4, 8, dtype=dtype)
            exact.moe_combine(x.view(4, 2, 4), torch.ones(4, 2), x[:, :4])
            exact.add_rms_norm(x, x, x[0], 1e-6)
            exact.token_logprobs(x, torch.arange(4))
            exact.attention(
                x.view(4, 2, 4), x.view(4, 2, 4), x.view(4, 2, 4), torch.tensor([0, 4]), 1.0, sinks=x[0, :2]
            )
    assert ("sqrt", torch.float64) in operations.found
    assert not {(name, dtype) for name, dtype in operations.found if name not in EXACT | ROUNDING[dtype]}
