"""Imports transformers without a look at every file of every installed package. Written for transformers 5.

transformers asks `importlib.metadata.packages_distributions` which package a module is of. That checks first that each
file of each package is still there: 30,000 files, a second of CPU time, and more where they lie on a network.
"""

from __future__ import annotations

import csv
import inspect
from importlib import metadata


def import_transformers() -> None:
    """Import transformers, with packages mapped by their own records. Does nothing if it is imported already."""
    original = metadata.packages_distributions
    metadata.packages_distributions = recorded_packages
    try:
        import transformers.utils  # noqa: F401
    finally:
        metadata.packages_distributions = original


def recorded_packages() -> dict[str, list[str]]:
    """Packages by the top-level modules that they declare or record, as `importlib.metadata.packages_distributions`."""
    found: dict[str, list[str]] = {}
    for package in metadata.distributions():
        declared = (package.read_text("top_level.txt") or "").split()
        recorded = csv.reader((package.read_text("RECORD") or "").splitlines())
        for name in declared or {_module(row[0]) for row in recorded}:
            if "." not in name:
                found.setdefault(name, []).append(package.metadata["Name"])
    return found


def _module(path: str) -> str:
    """The top-level module of a package's file."""
    first, inside, _ = path.partition("/")
    return first if inside else inspect.getmodulename(first) or first
