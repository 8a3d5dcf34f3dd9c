"""Quantities on the command lines of benchmarks."""

from __future__ import annotations


def positive(text: str) -> int:
    """Parses a positive integer, for argparse. Raises ValueError if it is 0 or less: nothing could be measured."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def positive_float(text: str) -> float:
    """Parses a positive number, for argparse. Raises ValueError if it is 0 or less."""
    if not (number := float(text)) > 0:
        raise ValueError
    return number
