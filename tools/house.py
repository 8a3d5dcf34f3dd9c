"""Measures the size of slimx, as a reader meets it: `python tools/house.py`.

Prints files, code lines and tokens by package, the import closure of a GRPO run, edges from the core to extras, public
names with one importer, dense idioms, uses of Any, and files, packages and constructors that are too large. With
`--run FILE [KEY=VALUE ...]`, the arguments of `slimx train`, that run follows, and the number of modules that all its
processes have loaded. Ends with status 1 if a bound is passed.

Tokens are those of Python's tokenizer without imports, docstrings, comments and layout; code lines are the lines that
have such a token.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "slimx.extras"
GRPO = (
    "slimx.orchestration.session",
    "slimx.trainer.process",
    "slimx.trainer.worker",
    "slimx.engines.server.launch",
    "slimx.adapters.sglang.plugin",
    "slimx.adapters.gpu",
    "slimx.rollout.single_turn",
    "slimx.extras.rewards.math",
    *(f"slimx.rules.{file.stem}" for file in sorted((ROOT / "slimx/rules").glob("[a-z]*.py"))),
)
"""Modules that the processes of a GRPO run start from: driver, trainer ranks, servers, hook, reward and rules."""
FILE_LINES, PACKAGE_FILES, PARAMETERS = 400, 12, 12
"""Lines of a file, files of a folder and parameters of a constructor beyond which they are listed."""
LARGE_PACKAGES = ("slimx.extras.families",)
BOUNDS = {
    "core tokens": 258_450,  # of which 1,500 load rows on ranks, 600 make requests cheaper, and 500 start workers
    "core files": 331,
    "closure": 316,
    "edges from core to extras": 0,
    "tuple assignments": 40,
    "walrus": 26,
    "comprehensions": 280,
    "ternaries": 184,
    "Any in the core": 40,
    "type: ignore in the core": 20,
}
"""Idioms per 100,000 nodes of the syntax tree: no more than the densest of six projects of the field."""
LOADED = 449
"""Most modules of slimx that all processes of the quickstart may load together. Alerts are 19 of them, packed answers
3, and the rules of rollout workers 2."""
LAYOUT = frozenset(
    (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Module:
    """A file of Python, measured."""

    name: str
    """Dotted, that of a package for its __init__.py."""
    folder: str
    """Dotted."""
    lines: int
    code_lines: int
    tokens: int
    imported: frozenset[tuple[str, str]]
    """(module, name) of each `from module import name`."""
    public: frozenset[str]
    """Names without a leading underscore that the module defines."""
    constructors: dict[str, int]
    """Parameters of `__init__`, without self, by class that defines it."""
    nodes: Counter[str]
    """Number of nodes of the syntax tree, and of those that are a dense idiom or the name Any."""
    ignores: int
    """Number of `type: ignore` comments."""

    @property
    def package(self) -> str:
        parts = self.name.split(".")
        return ".".join(parts[: 3 if self.in_extras else 2]) if len(parts) > 1 else self.name

    @property
    def in_extras(self) -> bool:
        return is_in_extras(self.name)


def is_in_extras(module: str) -> bool:
    return f"{module}.".startswith(f"{EXTRAS}.")


def code_tokens(text: str, tree: ast.Module) -> list[tokenize.TokenInfo]:
    """Returns the tokens of a file that are neither imports, docstrings, comments nor layout."""
    skipped: dict[int, list[tuple[int, int]]] = {}
    """Columns that are left out, by line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_docstring(node):
            for line in range(node.lineno, node.end_lineno + 1):
                start = node.col_offset if line == node.lineno else 0
                end = node.end_col_offset if line == node.end_lineno else sys.maxsize
                skipped.setdefault(line, []).append((start, end))
    lines = text.splitlines()

    def is_code(token: tokenize.TokenInfo) -> bool:
        line, column = token.start
        if token.type in LAYOUT:
            return False
        if line not in skipped:
            return True
        column = len(lines[line - 1][:column].encode())  # ast counts bytes
        return not any(start <= column < end for start, end in skipped[line])

    return [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if is_code(token)]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def count_nodes(tree: ast.Module) -> Counter[str]:
    """Counts the nodes of a syntax tree, its dense idioms by name, and uses of Any."""
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        counts["nodes"] += 1
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                counts["tuple assignments"] += 1
            case ast.NamedExpr():
                counts["walrus"] += 1
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                counts["comprehensions"] += 1
            case ast.IfExp():
                counts["ternaries"] += 1
            case ast.Name(id="Any"):
                counts["Any"] += 1
    return counts


def measure(name: str, folder: str, text: str) -> Module:
    """Measures the file of module `name`."""
    tree = ast.parse(text)
    tokens = code_tokens(text, tree)
    ignores = sum(line.count("# type: ignore") for line in text.splitlines())
    imported, public, constructors = set(), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {(node.module, alias.name) for alias in node.names}
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    signature = item.args
                    count = len(signature.posonlyargs) + len(signature.args) + len(signature.kwonlyargs) - 1
                    constructors[node.name] = count
    for node in tree.body:
        public |= {found for found in _defined(node) if not found.startswith("_")}
    code_lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Module(
        name, folder, len(text.splitlines()), len(code_lines), len(tokens),
        frozenset(imported), frozenset(public), constructors, count_nodes(tree), ignores,
    )  # fmt: skip


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def modules_of(package: Path) -> list[Module]:
    """Measures every file of a package."""
    found = []
    for path in sorted(package.rglob("*.py")):
        *folders, file = path.relative_to(package.parent).with_suffix("").parts
        folder = ".".join(folders)
        found.append(measure(folder if file == "__init__" else f"{folder}.{file}", folder, path.read_text()))
    return found


def closure(graph: grimp.ImportGraph, entries: Iterable[str]) -> set[str]:
    """Returns the modules that `entries` import, directly or not, with the packages around them and `entries`.

    Imports inside functions count, those for type checkers alone do not. Raises KeyError for an unknown entry.
    """
    waiting, found = list(entries), set()
    if unknown := [module for module in waiting if module not in graph.modules]:
        raise KeyError(f"{unknown[0]} is no module of the graph: correct GRPO in tools/house.py")
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [module.rpartition(".")[0]] if "." in module else []
            waiting += graph.find_modules_directly_imported_by(module)
    return found


def names_with_one_importer(modules: Sequence[Module]) -> tuple[int, int]:
    """Returns the number of public names that exactly one other file imports, and of those that any does."""
    importers = Counter(row for module in modules for row in module.imported)
    counts = [importers[module.name, name] for module in modules for name in module.public]
    return sum(count == 1 for count in counts), sum(count > 0 for count in counts)


def too_large(modules: Sequence[Module]) -> list[str]:
    """Returns a line for each file, folder and constructor that is larger than it should be."""
    lines = [f"{module.name}: {module.lines} lines" for module in modules if module.lines > FILE_LINES]
    for folder, count in sorted(Counter(module.folder for module in modules).items()):
        if count > PACKAGE_FILES and folder not in LARGE_PACKAGES:
            lines.append(f"{folder}: {count} files")
    for module in modules:
        for name, count in module.constructors.items():
            if count > PARAMETERS:
                lines.append(f"{module.name}.{name}: {count} parameters of the constructor")
    return lines


def figures(modules: Sequence[Module], graph: grimp.ImportGraph, entries: Iterable[str] = GRPO) -> dict[str, int]:
    """Returns the figures by name, among them those of `BOUNDS`; `entries`: modules whose closure is one."""
    core = [module for module in modules if not module.in_extras]
    edges = sum(
        is_in_extras(found) for module in core for found in graph.find_modules_directly_imported_by(module.name)
    )
    one, imported = names_with_one_importer(modules)
    nodes = sum((module.nodes for module in modules), Counter())
    idioms = ("tuple assignments", "walrus", "comprehensions", "ternaries")
    return {
        "tokens": sum(module.tokens for module in modules),
        "code lines": sum(module.code_lines for module in modules),
        "files": len(modules),
        "core tokens": sum(module.tokens for module in core),
        "core code lines": sum(module.code_lines for module in core),
        "core files": len(core),
        "closure": len(closure(graph, entries)),
        "edges from core to extras": edges,
        "public names with an importer": imported,
        "public names with one importer": one,
        **{idiom: round(nodes[idiom] * 1e5 / max(1, nodes["nodes"])) for idiom in idioms},
        "Any in the core": sum(module.nodes["Any"] for module in core),
        "type: ignore in the core": sum(module.ignores for module in core),
    }


def measured() -> tuple[list[Module], dict[str, int]]:
    """Returns slimx's modules and figures."""
    modules = modules_of(ROOT / "slimx")
    return modules, figures(modules, grimp.build_graph("slimx", exclude_type_checking_imports=True, cache_dir=None))


RECORDER = """
import os, sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "slimx":
            with open(os.path.join({directory!r}, str(os.getpid())), "a") as file:
                print(name, file=file)

sys.meta_path.insert(0, Recorder())
"""
"""A sitecustomize.py by which each process writes the modules of slimx that it imports into a file of `directory`."""


def record_imports(directory: Path) -> dict[str, str]:
    """Returns environment variables by which Python processes record in `directory` the modules that they load."""
    hook = directory / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(RECORDER.format(directory=str(directory)))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))}


def recorded_imports(directory: Path) -> set[str]:
    """Returns slimx's modules that processes have recorded in `directory`."""
    return {name for file in directory.iterdir() if file.is_file() for name in file.read_text().split()}


def loaded_by(arguments: Sequence[str]) -> set[str]:
    """Returns the modules that all processes of a run load. Raises CalledProcessError if the run fails."""
    with tempfile.TemporaryDirectory() as name:
        variables = record_imports(Path(name))
        subprocess.run(
            [sys.executable, "-m", "slimx.cli", "train", *arguments], env={**os.environ, **variables}, check=True
        )
        return recorded_imports(Path(name))


def passed_bounds(found: dict[str, int]) -> list[str]:
    """Returns a line for each bound that the figures pass."""
    return [f"{name}: {found[name]:,}, more than {bound:,}" for name, bound in BOUNDS.items() if found[name] > bound]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="+", metavar="ARGUMENT", help="arguments of slimx train")
    options = parser.parse_args()
    modules, found = measured()
    print(f"{'package':32}{'files':>8}{'lines':>10}{'tokens':>10}")
    for package in sorted({module.package for module in modules}):
        rows = [module for module in modules if module.package == package]
        lines, tokens = (sum(getattr(row, name) for row in rows) for name in ("code_lines", "tokens"))
        print(f"{package:32}{len(rows):8}{lines:10,}{tokens:10,}")
    print(*(f"{name:32}{value:8,}" for name, value in found.items()), sep="\n")
    print("larger than it should be:", *too_large(modules), sep="\n  ")
    if options.run:
        loaded = loaded_by(options.run)
        print(f"{'modules loaded by the run':32}{len(loaded):8}")
        print(f"{'extras among them':32}{sum(map(is_in_extras, loaded)):8}")
    for line in (passed := passed_bounds(found)):
        print(f"house: {line}", file=sys.stderr)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
