"""The graph of files: which file depends on which, and how far a test is from a change."""

from __future__ import annotations

import ast
import heapq
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path, PurePath

from tools.changed.names import MODULE, Names, fixtures

CALLS_MODULES = (".sh", ".yaml")
READS_REPOSITORY = ("tests/", "tools/", "benchmarks/", "setup.py")
"""Path prefixes of files whose strings may name any file of the repository. In slimx/ such strings are messages."""
LOADER, LIBRARIES = "slimx/library.py", "csrc/"
"""The module that loads the native libraries, and the directory of their sources."""
FAR = 3
"""Distance between a file and one that names its directory: such a file reads everything in there."""


class Graph:
    """`edges[node]` are the nodes that `node` depends on, with the distances.

    A node is a file, or a part of one: PATH! is what all files below its directory execute, the packages' __init__.py
    and the hooks of conftest.py; CONFTEST::NAME is a fixture. PATH! stands for a change of the whole file, too.
    """

    def __init__(self, root: Path, files: Collection[str]):
        """Builds the graph of `files`, the paths of the repository, including deleted ones."""
        self.root, self.files = root, {*files}
        self.edges: dict[str, dict[str, int]] = {}
        self._directories = {str(above) for file in files for above in PurePath(file).parents} - {"."}
        self._called: dict[str, set[str]] = defaultdict(set)
        """Name -> the files that have it. Conftests name the tests below them, which they do not depend on."""
        for file in self.files:
            if PurePath(file).name not in ("__init__.py", "conftest.py") and not self._is_test(file):
                self._called[PurePath(file).name].add(file)
        for file in sorted(files, key=lambda file: (not file.endswith("conftest.py"), file.count("/"))):
            if file.endswith(".py"):
                self._add_python(file)
            elif file.endswith(CALLS_MODULES):
                self.edges[file] = dict.fromkeys(self._modules({*MODULE.findall(self._read(file))}), 1)

    def distances(self, changed: Collection[str]) -> dict[str, int]:
        """Returns the test files that depend on a file of `changed`, nearest first, each with its distance."""
        dependents: dict[str, dict[str, int]] = defaultdict(dict)
        for node, targets in self.edges.items():
            for target, distance in targets.items():
                dependents[target][node] = distance
        found: dict[str, int] = {}
        queue = [(0, node) for file in changed for node in (file, f"{file}!")]
        while queue:
            distance, node = heapq.heappop(queue)
            if node not in found:
                found[node] = distance
                for dependent, further in dependents[node].items():
                    heapq.heappush(queue, (distance + further, dependent))
        tests = (node for node in found if self._is_test(node))
        order = sorted(tests, key=lambda test: (found[test], not test.startswith("tests/unit/"), test))
        return {test: found[test] for test in order}

    def _is_test(self, node: str) -> bool:
        return node.startswith("tests/") and PurePath(node).match("test_*.py") and (self.root / node).exists()

    def _read(self, file: str) -> str:
        return (self.root / file).read_text(errors="replace") if (self.root / file).exists() else ""

    def _add_python(self, file: str) -> None:
        folder = PurePath(file).parent
        try:
            tree = ast.parse(self._read(file))
        except SyntaxError:  # in the middle of an edit
            tree = ast.Module([], [])
        self.edges[file] = self._targets(file, Names.of(tree.body, folder))
        if file.endswith("conftest.py"):
            parts = {f"{file}::{name}" if name else f"{file}!": names for name, names in fixtures(tree, folder)}
            self.edges |= {part: {} for part in parts}
            self.edges |= {part: self._targets(file, names) for part, names in parts.items()}
        if file == LOADER:
            self.edges[file] |= {source: 1 for source in self.files if source.startswith(LIBRARIES)}

    def _targets(self, file: str, names: Names) -> dict[str, int]:
        folder = PurePath(file).parent
        above = (folder, *folder.parents)
        near = self._modules(names.modules)
        for name in names.imports:
            beside = f"{folder}/{name}".replace("/", ".")  # scripts import so
            near |= self._modules({name}, 1) | self._modules({beside}, len(folder.parts) + 1)
        if file.startswith("tests/"):
            for conftest in {f"{place}/conftest.py" for place in above} & self.files:
                near |= {f"{conftest}!", *(f"{conftest}::{word}" for word in names.words)} & self.edges.keys()
        called = {candidate for path in names.files for candidate in self._files(path)}
        if not file.startswith(READS_REPOSITORY):
            called = {candidate for candidate in called if candidate.partition("/")[0] == file.partition("/")[0]}
            return dict.fromkeys(near | called, 1)
        places = {str(place / path) for path in map(known, names.directories) if path for place in above}
        starts = tuple(f"{place}/" for place in places & self._directories)
        far = [candidate for candidate in self.files if candidate.startswith(starts)] if starts else []
        return dict.fromkeys(far, FAR) | dict.fromkeys(near | called, 1)

    def _files(self, path: str) -> set[str]:
        """Returns the files whose paths end with `path`."""
        if "." not in path and path not in self.files:  # any word
            return set()
        namesakes = self._called.get(PurePath(path).name, ())
        return {candidate for candidate in namesakes if f"/{candidate}".endswith(f"/{path}")}

    def _modules(self, names: Collection[str], least: int = 2) -> set[str]:
        """Returns the files of modules, or of those that contain what has the name, and their packages' PATH!.

        `least`: fewest parts of the name that are the module; one alone is any word.
        """
        found = set()
        for name in names:
            parts = name.split(".")
            if parts == [name]:
                found.add(f"{name}/__init__.py!")
                continue
            for count in range(len(parts), least - 1, -1):
                path = "/".join(parts[:count])
                if file := {f"{path}.py", f"{path}/__init__.py"} & self.files:
                    found |= file | {f"{above}/__init__.py!" for above in PurePath(path).parents}
                    break
        return found


def known(path: str) -> str:
    """Returns the directory of a path with `*`; other paths unchanged."""
    return path.partition("*")[0].rpartition("/")[0] if "*" in path else path
