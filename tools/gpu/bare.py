"""Collects tests as a machine does that has numpy, torch, pytest and setuptools alone: `python -m tools.gpu.bare`.

    python -m tools.gpu.bare [TEST_FILE ...]

Every other package is hidden from the interpreter, as if it were not installed: a test file that imports one without
asking for it first cannot be collected, which is the finding. The packages that those four require are visible.
"""

from __future__ import annotations

import argparse
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

from tools.gpu.check import NEEDED

ROOT = Path(__file__).parents[2]
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


def hidden(distributions: set[str]) -> set[str]:
    """Returns the top-level names that cannot be imported where only `distributions` are installed."""
    owners = metadata.packages_distributions()
    names = {name for name, owned in owners.items() if not distributions & set(map(canonicalize_name, owned))}
    return names - set(sys.stdlib_module_names) - set(OURS)


class Hiding(MetaPathFinder):
    """A finder of `sys.meta_path` that does not find the modules of some top-level names."""

    def __init__(self, finder: Any, names: Collection[str]):
        self._finder, self._names = finder, names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the finder's answer; None for a module that is hidden."""
        return None if name.partition(".")[0] in self._names else self._finder.find_spec(name, path, target)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._finder, attribute)


def hide(names: Collection[str]) -> None:
    """Hides the modules of some top-level names, imported ones too, from here on."""
    sys.meta_path[:] = [Hiding(finder, names) for finder in sys.meta_path]
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="TEST_FILE")
    files = parser.parse_args().files or [str(path) for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    hide(hidden(required(NEEDED)))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins are hidden, too
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"]
    return int(pytest.main([*arguments, f"--rootdir={ROOT}", *files]))


if __name__ == "__main__":
    sys.exit(main())
