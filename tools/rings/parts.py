"""Divides the files of `make test-all` into ten parts."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

PARTS = 10
NAMES = tuple(f"{number}/{PARTS}" for number in range(1, PARTS + 1))
FOLDERS = ("tests/unit", "tests/extras", "tests/integration")
GPU_FILE = "tests/gpu/test_exact_trainer.py"
"""The one file of tests/gpu that also runs without a GPU."""
SALT = 53414
"""Makes parts differ least of the first 100,000 numbers: 829 to 1,254 of 10,234 tests, and 6 to 11 files of integration
tests (2026-11-27). Another number would mix the results of parts."""


def test_files(root: Path) -> list[str]:
    """Returns the files of `make test-all`, relative to `root`, sorted."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("test_*.py")]
    return sorted([path.relative_to(root).as_posix() for path in found] + [GPU_FILE])


def part_of(file: str) -> str:
    """Returns the part of a file, such as 3/10: by a hash of its path, so it stays there when others are added."""
    return f"{crc32(f'{SALT}:{file}'.encode()) % PARTS + 1}/{PARTS}"
