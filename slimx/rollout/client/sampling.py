"""Sampling parameters: which ones engines carry out, and in which form they are sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slimx.errors import SlimxError

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "stop_token_ids", "stop", "ignore_eos"}
)
"""Sampling parameters that SGLang's seeded mode carries out; others are refused."""


def checked_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """`sampling` in Python's own types, which JSON has. Raises SlimxError for a parameter that engines do not carry out
    and for a number that is not finite."""
    if unknown := sorted(sampling.keys() - SAMPLING):
        why = (
            "min_p cannot be combined with a seed"
            if unknown[0] == "min_p"
            else f"known are {', '.join(sorted(SAMPLING))}"
        )
        raise SlimxError(f"sampling parameter {unknown[0]} is not supported by the engines; {why}")
    return {name: _plain(name, value) for name, value in sampling.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise SlimxError(f"sampling parameter {name} is {value}; give a finite number")
    return value
