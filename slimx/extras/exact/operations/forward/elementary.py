"""Elementary operations of exact mode in torch: square root, exp, log, sigmoid, sine, cosine, and sums in a fixed
order.

torch rounds elementwise additions, products, quotients and conversions correctly on every device. A fixed sequence of
them therefore has bitwise equal results everywhere (tests/extras/exact/test_rounding.py checks the current machine).
`csrc/exact.h` implements the same operations in C++ and CUDA.
"""

import math

import torch

from slimx.extras.exact.operations.sizes import LANES, SUM_BLOCK

# Square root -------------------------------------------------------------------------------------------------------


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded square root of fp32 values.

    torch.sqrt calls MKL, which on non-Intel processors does not round correctly: 17% of results are off by one ulp.
    Here the root is computed in fp64 and rounded to fp32. The root of an fp32 number is never so close to the midpoint
    of two fp32 numbers that an error in the last bits of fp64 could change this second rounding (Figueroa, SIGNUM
    30(3), 1995: 2 * 24 + 2 bits suffice).
    """
    return x.double().sqrt().float()


# Sums -----------------------------------------------------------------------------------------------------------------


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds 2^n tensors of one shape in a binary tree of adjacent pairs: ((p0 + p1) + (p2 + p3)) + ..."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sum_lanes(lanes: torch.Tensor) -> torch.Tensor:
    """Adds the partial sums of all lanes, [..., LANES] -> [...], by repeatedly adding the upper half of the lanes to
    the lower half."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums each row, [rows, n] fp32 -> [rows]. Each block of SUM_BLOCK elements has LANES partial sums, and the sums of
    blocks are added in order.

    Values must not be negative, so that neither padding with zeros nor omitting the padding of a single block changes
    the result.
    """
    rows, n = x.shape
    size = min(SUM_BLOCK, n + -n % LANES)
    x = torch.nn.functional.pad(x, (0, -n % size)).view(rows, -1, size // LANES, LANES)
    lanes = x[:, :, 0]
    for step in range(1, x.shape[2]):
        lanes = lanes + x[:, :, step]
    blocks = sum_lanes(lanes)
    total = blocks[:, 0]
    for block in range(1, blocks.shape[1]):
        total = total + blocks[:, block]
    return total


# Functions ------------------------------------------------------------------------------------------------------------

_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375  # has so few bits that n * _LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4  # ln 2 - _LN2_HIGH
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds a small fp32 number to an integer
EXP_LEAST = -87.3365447505
EXP_MOST = 88.7228391116


def exp(x: torch.Tensor) -> torch.Tensor:
    """Computes e^x of fp32 values within 2 ulp; the result is 0 for x below EXP_LEAST, where e^x is about 2^-126, and
    infinite above EXP_MOST.

    Uses the polynomial of Cephes' expf (Moshier), with each product and each addition rounded.
    """
    n = (x * _LOG2_E + _ROUNDER) - _ROUNDER
    n = n.clamp(-127, 128)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = torch.full_like(r, _EXP[0])
    for coefficient in _EXP[1:]:
        y = y * r + coefficient
    y = (y * (r * r) + r) + 1.0
    integer = torch.where(x.isnan(), 0.0, n).int()
    low = integer >> 1  # in two steps, because 2^128 is not an fp32 number
    y = y * _power_of_two(low) * _power_of_two(integer - low)
    y = torch.where(x < EXP_LEAST, 0.0, y)
    y = torch.where(x > EXP_MOST, torch.inf, y)
    return torch.where(x.isnan(), torch.nan, y)


def log(x: torch.Tensor) -> torch.Tensor:
    """Computes the natural logarithm of normal fp32 numbers within 2 ulp, by the same operations in the same order as
    Cephes' logf."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)  # 1/2 <= m < 1
    small = m < 0.70710678118654752440
    e = torch.where(small, exponent - 1, exponent).float()
    m = torch.where(small, m + m, m) - 1.0
    z = m * m
    y = torch.full_like(m, _LOG[0])
    for coefficient in _LOG[1:]:
        y = y * m + coefficient
    y = (y * m) * z
    y = y + e * _LN2_LOW
    y = y - 0.5 * z
    return torch.where(x.isnan(), x, (m + y) + e * _LN2_HIGH)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes the logistic function 1 / (1 + e^-x) in fp32."""
    return torch.ones_like(x) / (1.0 + exp(-x))


def sine_and_cosine(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the sine and the cosine of fp64 angles up to 2^20 within 1e-15, using only additions and
    multiplications, independently of any library.

    Reduces the angles modulo pi / 2, which is split into three parts (Cody and Waite), then sums Taylor series to fp64
    precision.
    """
    # fdlibm's three parts of pi / 2: two of 33 bits, whose products with integers below 2^20 are exact, and the
    # remainder.
    parts = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
    n = (angle * (2.0 / math.pi)).round()
    r = ((angle - n * parts[0]) - n * parts[1]) - n * parts[2]
    square = r * r
    sine = torch.zeros_like(r)
    cosine = torch.zeros_like(r)
    for k in range(8, -1, -1):
        sine = sine * square + (-1.0) ** k / math.factorial(2 * k + 1)
        cosine = cosine * square + (-1.0) ** k / math.factorial(2 * k)
    sine = sine * r
    quarter = n.long() & 3
    swapped = quarter & 1 == 1
    s = torch.where(swapped, cosine, sine)
    c = torch.where(swapped, sine, cosine)
    return torch.where(quarter >= 2, -s, s), torch.where((quarter == 1) | (quarter == 2), -c, c)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Returns 2^exponent for int32 exponents between -126 and 127."""
    return ((exponent + 127) << 23).view(torch.float32)
