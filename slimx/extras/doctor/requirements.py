"""Parses the version requirements of installed distributions with Python's standard library alone."""

from __future__ import annotations

import re


def split_requirement(requirement: str) -> tuple[str, str]:
    """Splits a requirement into the package's name and its version range: `ray[default]>=2.50` becomes ("ray",
    ">=2.50")."""
    match = re.fullmatch(r"([\w.-]+)(\[[^]]*\])?\s*([^;]*?)\s*(?:;.*)?", requirement)
    assert match is not None
    return match[1], match[3]


def fits(version: str, needed: str) -> bool:
    """Returns True if `version` is within the version range `needed`."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True  # `packaging` is in the lock file, so its absence is reported
    return SpecifierSet(needed).contains(version, prereleases=True)
