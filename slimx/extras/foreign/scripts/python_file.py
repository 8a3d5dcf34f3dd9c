"""Arguments of TRL's classes in a Python file, read from its syntax tree without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.shell.expansion import COMPUTED, END

_OTHERS = ("ModelConfig", "DatasetMixtureConfig")
"""TRL's classes of settings that are not those of a trainer."""


def arguments_in(file: Path, text: str) -> dict[str, list[str]]:
    """Returns the arguments of TRL's settings and trainer in the Python code `text`, by name, as words of a command
    line; one that is not literal is marked as computed. The entry `trainer` has the name of the settings' class,
    `dataset_name` the data set that the code loads. Raises SlimxError if the code is not valid Python."""
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
    for name, module in imported.items():
        if module.partition(".")[0] == "trl" and name.endswith("Trainer"):
            found["trainer"] = [name.replace("Trainer", "Config")]
    settings: dict[str, list[str]] = {}
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        module, _, name = _name(call.func).rpartition(".")
        origin = module or imported.get(name, "")
        if name.endswith("Config") and origin.partition(".")[0] == "trl" and name not in _OTHERS:
            settings = {"trainer": [name], **_keywords(call, constants)}
        elif name.endswith("Trainer"):
            found |= _of_trainer(call, constants, imported, file.stem)
            if module.startswith("trl"):
                found["trainer"] = [name.replace("Trainer", "Config")]
        elif name == "LoraConfig":  # with the defaults of PEFT
            found |= {"use_peft": [], "lora_r": ["8"], "lora_alpha": ["8"]}
            for key, words in _keywords(call, constants).items():
                found[f"lora_{key.removeprefix('lora_')}"] = words
        elif name == "load_dataset":
            keywords = _keywords(call, constants)
            path, *subset = [*(_literal(node, constants) for node in call.args[:2]), *keywords.get("name", [])] or [""]
            found.setdefault("dataset_name", keywords.get("path", [path]))
            found.setdefault("dataset_config", subset[:1])
            found.setdefault("dataset_train_split", keywords.get("split", [])[:1])
    if "use_peft" in found:
        found.pop("peft_config", None)
    return found | settings


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
        found[keyword.arg or "**"] = _words([keyword.value], constants) or [_computed(keyword.value)]
    return found


def _literal(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    return "".join(_words([node], constants)[:1]) or _computed(node)


def _computed(node: ast.expr) -> str:
    return f"{COMPUTED}{ast.unparse(node)}{END}"


def _of_trainer(
    call: ast.Call, constants: dict[str, ast.expr], imported: dict[str, str], module: str
) -> dict[str, list[str]]:
    """Returns the arguments of a trainer, without its settings and its data set; rewards are dotted paths."""
    found = _keywords(call, constants)
    for name in ("args", "train_dataset"):
        found.pop(name, None)
    if "model" in found:
        found["model_name_or_path"] = found.pop("model")
    for keyword in call.keywords:
        if keyword.arg == "reward_funcs":
            value = keyword.value
            if isinstance(value, ast.Name) and isinstance(constants.get(value.id), ast.List | ast.Tuple):
                value = constants[value.id]
            entries = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            found["reward_funcs"] = []
            for entry in entries:
                name = _name(entry)
                path = f"{imported.get(name, module)}.{name}" if name else _literal(entry, constants)
                found["reward_funcs"].append(path)
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
