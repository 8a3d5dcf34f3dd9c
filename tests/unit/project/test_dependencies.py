"""Every package that the project imports is declared in pyproject.toml, where a user who installs slimx gets it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ELSEWHERE = {
    "datasets": "read if the user has it",
    "deep_ep": "of SGLang's CUDA build",
    "deep_gemm": "of SGLang's CUDA build",
    "sgl_kernel": "of SGLang's CUDA build",
    "torch_memory_saver": "of SGLang's CUDA build",
    "nemo_gym": "in an environment of its server, build/hubs",
    "resources_servers": "in an environment of its server, build/hubs",
    "openenv": "in an environment of its server, build/hubs",
    "verifiers": "in an environment of its server, build/hubs",
    "openai": "a requirement of verifiers, in the environment of its server",
    "nltk": "data of IFEval's checkers",
    "trl": "a peer that a benchmark measures, installed by hand",
    "fastapi": "the web framework of SGLang's server, in which alone it is imported",
    "orjson": "SGLang's JSON encoder, of which a benchmark takes the time",
    "pybase64": "SGLang's base64 decoder",
    "program": "a file of a box's program",
    "slime": "a module that slimx's adapter for slime hooks provides",
    "sitecustomize": "a file that a test writes",
    "my_hooks": "a file that a test writes",
}
"""Packages that an environment of slimx need not have: why."""


def names(requirements: list[str]) -> set[str]:
    return {normalized(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


BASE = names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]])
GROUPS = {group: names(requirements) for group, requirements in PROJECT["optional-dependencies"].items()}
USERS = BASE.union(*(packages for group, packages in GROUPS.items() if group != "dev"))
DISTRIBUTIONS = importlib.metadata.packages_distributions() | {"mlflow": ["mlflow-skinny"]}
FOLDERS = ("slimx", "tests", "tools", "benchmarks", "examples")
OURS = sys.stdlib_module_names.union(
    FOLDERS, *({path.stem for path in (ROOT / folder).rglob("*.py")} for folder in FOLDERS)
)
"""Modules of Python's library and of the project."""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields the top-level name of each absolute import of a file, and True if it happens when the file is imported."""
    tree = ast.parse(path.read_text())
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node not in late
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node not in late


def distributions(name: str) -> set[str]:
    """Returns the distributions that bring a module: the name itself where none is installed."""
    return {normalized(distribution) for distribution in DISTRIBUTIONS.get(name, [name])}


def undeclared(folder: str, allowed: set[str], *, early: set[str] | None = None) -> list[str]:
    """Returns `file: name` for each import of a folder that `allowed` lacks; `early`: for imports of the core's modules
    outside functions."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        in_core = folder == "slimx" and "extras" not in path.parts
        for name, at_import in imports(path):
            declared = early if early is not None and in_core and at_import else allowed
            if name not in OURS and name not in ELSEWHERE and not distributions(name) & declared:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def test_slimx_declares_what_it_imports():
    assert undeclared("slimx", USERS, early=BASE) == []


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_developers_get_what_the_project_imports(folder):
    assert undeclared(folder, USERS | GROUPS["dev"]) == []


def test_an_undeclared_import_is_found(monkeypatch, tmp_path):
    (tmp_path / "slimx").mkdir()
    (tmp_path / "slimx" / "one.py").write_text("import torch, left_pad\n\ndef late():\n    import wandb\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert undeclared("slimx", USERS, early=BASE) == ["slimx/one.py: left_pad"]
