"""Values that no field of a file expects, and the CPU time that the answer to them may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.rings.machine import REFERENCE_S, loop_seconds

ROOT = Path(__file__).parents[3]
NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2,
    3,
    7,
    64,
    1024,
    65536,
    65537,
    10**9,
    10**30,
    -(10**30),
    0.5,
    -0.0,
    1.5,
    1e-300,
    1e300,
]
NOT_NUMBERS: list[Any] = [float("nan"), float("inf"), float("-inf")]
STRINGS = [
    "",
    " ",
    "x",
    "8",
    "-1",
    "null",
    "a.b",
    "../..",
    "/",
    "~",
    "\x1b[31m",
    "\u202e",
    "{}",
    "[]",
    "${run.dir}",
    "x" * 5000,
]
STRUCTURES: list[Any] = [None, True, False, [], {}, [1, 2], {"a": 1}, [[]], [{}], {"": None}, {1: 2}]
CPU_SECONDS = 20.0
"""CPU seconds that one plan may take on the reference machine: another order of growth takes more."""


def too_long(seconds: float) -> bool:
    """Returns True for more CPU seconds than `CPU_SECONDS`, on a slower machine as many times more as it is slower."""
    return seconds > CPU_SECONDS and seconds > CPU_SECONDS * loop_seconds() / REFERENCE_S
