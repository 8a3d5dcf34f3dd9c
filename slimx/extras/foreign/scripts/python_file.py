"""Arguments of TRL's classes in a Python file, read from its syntax tree without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slimx.errors import SlimxError

CONFIGS = ("GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "RewardConfig")
"""Classes of settings whose trainers have a counterpart."""


def arguments_in(file: Path, text: str) -> dict[str, list[str]]:
    """Returns the literal arguments of TRL's settings and trainer in the Python code `text`, by name, as words of a
    command line. The entry `trainer` has the name of the settings' class, `dataset_name` the data set that the code
    loads. Raises SlimxError if the code is not valid Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SlimxError(
            f"{file}, line {error.lineno}: this is not Python ({error.msg}); correct the file",
            code="foreign.not_python",
            about=str(file),
        ) from error
    constants = _constants(tree)
    imported = _imported(tree)
    found: dict[str, list[str]] = {}
    for call in _calls(tree):
        name = _name(call.func).rpartition(".")[2]
        if name in CONFIGS:
            found["trainer"] = [name]
            found |= _keywords(call, constants)
        elif name.endswith("Trainer"):
            found.setdefault("trainer", [name.replace("Trainer", "Config")])
            found |= _of_trainer(call, constants, imported, file.stem)
        elif name == "load_dataset" and call.args:
            found.setdefault("dataset_name", ["/".join(_words(call.args[:2], constants))])
            split = next((word.value for word in call.keywords if word.arg == "split"), None)
            words = [] if split is None else _words([split], constants)
            if words:
                found.setdefault("dataset_train_split", words[:1])
    return found


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the values that names are assigned in `tree`, by name; those of the last assignment."""
    constants: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    constants[target.id] = node.value
    return constants


def _imported(tree: ast.Module) -> dict[str, str]:
    """Returns the modules from which names are imported, by name."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                modules[alias.asname or alias.name] = node.module
    return modules


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call, constants: dict[str, ast.expr]) -> dict[str, list[str]]:
    found = {}
    for keyword in call.keywords:
        words = _words([keyword.value], constants)
        if keyword.arg is not None and words:
            found[keyword.arg] = words
    return found


def _of_trainer(
    call: ast.Call, constants: dict[str, ast.expr], imported: dict[str, str], module: str
) -> dict[str, list[str]]:
    """Returns the model and the rewards of a trainer; rewards are dotted paths."""
    found = {}
    for keyword in call.keywords:
        if keyword.arg == "model":
            words = _words([keyword.value], constants)
            if words:
                found["model_name_or_path"] = words
        if keyword.arg == "reward_funcs":
            value = keyword.value
            if isinstance(value, ast.Name) and isinstance(constants.get(value.id), ast.List | ast.Tuple):
                value = constants[value.id]
            entries = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            names = [_name(entry) or "".join(_words([entry], constants)) for entry in entries]
            found["reward_funcs"] = [f"{imported.get(name, module)}.{name}" for name in names if name]
    return found


def _words(nodes: list[ast.expr], constants: dict[str, ast.expr]) -> list[str]:
    """Returns the literal values of `nodes` as words; none for other expressions."""
    words: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in constants:
            node = constants[node.id]
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            continue
        words += [str(entry) for entry in value] if isinstance(value, list | tuple) else [str(value)]
    return words
