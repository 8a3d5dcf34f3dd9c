"""Runs the tests that the working tree's change can reach: `make test-changed`.

`python -m tools.changed [--base REV] [--list] [-- ARGUMENTS OF PYTEST]`. The change is what git sees between REV,
HEAD unless it is named, and the working tree, with untracked files. Slow tests run, too. Nearest tests come first: with
the argument -x of pytest the first failure ends the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.changed.graph import Graph


def git(root: Path, *arguments: str) -> set[str]:
    """Returns the paths that git lists."""
    done = subprocess.run(["git", *arguments, "-z"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)} failed in {root}: {done.stderr.partition(chr(10))[0]}")
    return {*done.stdout.split("\0")} - {""}


def reached(root: Path, base: str) -> tuple[set[str], dict[str, int]]:
    """Returns the files that differ from `base`, and the affected test files with their distances in the graph."""
    untracked = git(root, "ls-files", "--others", "--exclude-standard")
    changed = git(root, "diff", "--name-only", "--no-renames", "--relative", base) | untracked
    return changed, Graph(root, git(root, "ls-files") | changed).distances(changed) if changed else {}


class Nearest:
    """A pytest plugin that runs test files nearest first and reports how many tests were selected."""

    def __init__(self, distances: Mapping[str, int], root: Path):
        self.order = {root / file: number for number, file in enumerate(distances)}

    @pytest.hookimpl(trylast=True)  # a conftest may order tests as it suits whole suites
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.order[item.path])

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str:
        slow = sum(item.get_closest_marker("slow") is not None for item in items)
        return f"reached: {len(items) - slow} tests of `make test` and {slow} slow ones, nearest first"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m tools.changed")
    parser.add_argument("--base", default="HEAD", metavar="REV", help="what the working tree is compared with")
    parser.add_argument("--list", action="store_true", help="print the test files with their distances, run none")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="of pytest, behind --")
    options = parser.parse_args()
    root = Path.cwd()
    changed, distances = reached(root, options.base)
    if not changed:
        print(f"No file differs from {options.base}.")
        return 0
    if not distances:
        print(f"No test depends on what differs from {options.base}: {', '.join(sorted(changed))}.")
        return 0
    count = len(changed)
    print(f"{len(distances)} test files depend on the {count} files that differ from {options.base}.", flush=True)
    if options.list:
        print("\n".join(f"{distance:3} {test}" for test, distance in distances.items()))
        return 0
    return pytest.main(["-m", "slow or not slow", *options.pytest, *distances], plugins=[Nearest(distances, root)])


if __name__ == "__main__":
    sys.exit(main())
