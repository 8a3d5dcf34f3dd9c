"""Collects tests as a machine does that has numpy, torch, pytest and setuptools alone: `python -m tools.gpu.bare`.

    python -m tools.gpu.bare [TEST_FILE ...]

Every other package is hidden from the interpreter, as if it were not installed: a test file that imports one without
asking for it first cannot be collected, which is the finding. The packages that those four require are visible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NEEDED = ("numpy", "torch", "pytest", "setuptools")
"""Packages without which nothing of `make gpu` runs."""
OURS = ("slimx", "tests", "tools", "benchmarks")
"""Packages of the working tree."""


def required(names: Iterable[str]) -> set[str]:
    """Returns the installed distributions among `names` and all that they require, by their normal names."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


def importable(distributions: Collection[str]) -> set[str]:
    """Returns the top-level names that can be imported where only `distributions` are installed."""
    names = {
        name
        for name, owners in metadata.packages_distributions().items()
        if any(canonicalize_name(owner) in distributions for owner in owners)
    }
    return names | set(sys.stdlib_module_names) | set(OURS)


class Visible(MetaPathFinder):
    """A finder of `sys.meta_path` that finds nothing but modules of some top-level names."""

    def __init__(self, finder: Any, names: Collection[str]):
        self._finder, self._names = finder, names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the finder's answer; None for a module of another name."""
        return self._finder.find_spec(name, path, target) if name.partition(".")[0] in self._names else None

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._finder, attribute)


def hide_all_but(names: Collection[str]) -> None:
    """Hides every module whose top-level name is not among `names`, from here on."""
    sys.meta_path[:] = [Visible(finder, names) for finder in sys.meta_path]
    for name in list(sys.modules):
        if name.partition(".")[0] not in names and not name.startswith("__"):
            del sys.modules[name]


def main() -> int:
    files = sys.argv[1:] or [str(path) for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    hide_all_but(importable(required(NEEDED)))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins are hidden, too
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"]
    return int(pytest.main([*arguments, f"--rootdir={ROOT}", *files]))


if __name__ == "__main__":
    sys.exit(main())
