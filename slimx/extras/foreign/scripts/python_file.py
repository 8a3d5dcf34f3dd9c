"""Arguments of TRL's classes in a Python file, read from its syntax tree without running it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.names import word_of
from slimx.extras.foreign.scripts.shell.expansion import computed

_OTHERS = ("ModelConfig", "DatasetMixtureConfig")
"""TRL's classes of settings that are not those of a trainer."""
_POSITIONS = dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), ("model", "reward_funcs", "args", "train_dataset"))
"""Names of the arguments of TRL's trainers by position; other trainers start with the model."""


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
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found: dict[str, list[str]] = {}
    for name, module in imported.items():
        if module.partition(".")[0] == "trl" and name.endswith("Trainer"):
            found["trainer"] = [name.replace("Trainer", "Config")]
    settings: dict[str, list[str]] = {}
    owners = set()  # names of the settings
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        module, _, name = _name(call.func).rpartition(".")
        origin = module or imported.get(name, "")
        if name.endswith("Config") and origin.partition(".")[0] == "trl" and name not in _OTHERS:
            owners |= {target for target, value in constants.items() if value is call}
            settings = {"trainer": [name], **_literals(_arguments(call, constants, "output_dir"), constants)}
        elif name.endswith("Trainer"):
            arguments = _arguments(call, constants, *_POSITIONS.get(name, ("model",)))
            owners.add(_name(arguments.get("args", call)))
            found |= _of_trainer(arguments, constants, imported, file.stem)
            if module.startswith("trl"):
                found["trainer"] = [name.replace("Trainer", "Config")]
        elif name == "LoraConfig":  # with the defaults of PEFT
            found |= {"use_peft": [], "lora_r": ["8"], "lora_alpha": ["8"]}
            for key, words in _literals(_arguments(call, constants), constants).items():
                found[f"lora_{key.removeprefix('lora_')}"] = words
        elif name == "load_dataset":
            loaded = _literals(_arguments(call, constants, "path", "name"), constants)
            for ours, theirs in (("name", "path"), ("config", "name"), ("train_split", "split")):
                found.setdefault("dataset_" + ours, loaded.get(theirs, [])[:1])
    for node in ast.walk(tree):  # what is set after the settings were made
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and _name(target.value) in owners - {""}:
                    settings |= _literals({target.attr: node.value}, constants)
    if "use_peft" in found:
        found.pop("peft_config", None)
    return found | settings


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the values of the names to which `tree` gives only one value, by name."""
    constants: dict[str, ast.expr] = {}
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                constants[_name(target)] = node.value
    return {name: value for name, value in constants.items() if bound[name] == 1}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return _name(node.value) + "." + node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _arguments(call: ast.Call, constants: dict[str, ast.expr], *positions: str) -> dict[str, ast.expr]:
    """Returns the arguments of `call` by name; those without a name have the names `positions`, or `*`."""
    found = dict(zip([*positions, *"*" * len(call.args)], call.args, strict=False))
    for keyword in call.keywords:
        value = constants.get(_name(keyword.value), keyword.value)
        if keyword.arg is not None:
            found[keyword.arg] = keyword.value
        elif isinstance(value, ast.Dict):
            found |= {getattr(key, "value", "**"): part for key, part in zip(value.keys, value.values, strict=True)}
        elif isinstance(value, ast.Call) and _name(value.func) == "dict":
            found |= _arguments(value, constants)
        else:
            found["**"] = value
    return found


def _literals(arguments: dict[str, ast.expr], constants: dict[str, ast.expr]) -> dict[str, list[str]]:
    """Returns the values of `arguments` as words, by name."""
    return {name: _words(node, constants) for name, node in arguments.items()}


def _of_trainer(
    arguments: dict[str, ast.expr], constants: dict[str, ast.expr], imported: dict[str, str], module: str
) -> dict[str, list[str]]:
    """Returns the arguments of a trainer, without its settings and its data set; rewards are dotted paths."""
    found = _literals(arguments, constants)
    for name in ("args", "train_dataset"):
        found.pop(name, None)
    if "model" in found:
        found["model_name_or_path"] = found.pop("model")
    value = arguments.get("reward_funcs")
    if value is not None:
        if isinstance(constants.get(_name(value)), ast.List | ast.Tuple):
            value = constants[_name(value)]
        entries = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        found["reward_funcs"] = []
        for entry in entries:
            name = _name(entry)
            found["reward_funcs"] += [imported.get(name, module) + "." + name] if name else _words(entry, constants)
    return found


def _words(node: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    """Returns the literal value of `node` as words; an expression as one that is marked as computed."""
    node = constants.get(_name(node), node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return [computed(ast.unparse(node))]
    return [*map(word_of, value if isinstance(value, list | tuple) else [value])] or [""]
