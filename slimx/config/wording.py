"""Wording of errors from YAML, OmegaConf and pydantic, and of errors in command-line arguments."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import ErrorDetails
from yaml import MarkedYAMLError

from slimx.config.foreign_names import of_word
from slimx.config.section import echoed, shortened
from slimx.config.suggestions import listed
from slimx.errors import one_line

UNCLOSED = {"while parsing a flow mapping": "{...}", "while parsing a flow sequence": "[...]"}


def no_file(path: Path) -> str:
    """Returns the error message for a `path` that is not a configuration file, with a suggestion."""
    text = echoed(str(path))
    if "=" in path.name:
        return f"{text} is an override, not a configuration file; put the YAML file first, as in FILE {text}"
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.glob("*.y*ml")) if folder.is_dir() else []
    if path.is_dir():
        choice = f"one of {', '.join(names[:4])} in it" if names else "the YAML file of a run"
        return f"{text} is a directory; give {choice}"
    stems = {Path(name).stem: name for name in names}
    near = difflib.get_close_matches(path.stem, stems, n=1)
    hint = f"did you mean {path.with_name(stems[near[0]])}?" if near else "give the path of a YAML file"
    return f"the configuration file {text} does not exist; {hint}"


def no_sections(path: Path, tree: object, sections: Collection[str]) -> str | None:
    """Returns the reason why `tree`, the content of the YAML file `path`, cannot be a configuration; None if it may be
    one. `sections`: names of all sections."""
    if isinstance(tree, Mapping) and not tree:
        return "the file is empty; start from a copy of configs/moe/quickstart.yaml"
    if not isinstance(tree, Mapping) or not any(value is not None for value in tree.values()):
        return "the file has no sections; a configuration is a mapping of sections such as `run:`"
    if path.suffix not in (".yaml", ".yml") and not tree.keys() & set(sections):
        return (
            f"the file has none of a run's sections, and its name ends in {path.suffix or path.name}; give the YAML "
            "file of a run"
        )
    return None


def no_override(override: str, following: Sequence[str], keys: Sequence[str]) -> str:
    """Returns the error message for an `override` that is not of the form KEY=VALUE. `following`: the command-line
    arguments after it; `keys`: all dotted keys of a configuration."""
    if following and following[0].startswith("="):
        parts = following[:2] if following[0] == "=" else following[:1]
        joined = override + "".join(parts)
        return f"override {echoed(override)!r} has spaces around its '='; write {echoed(joined)}"
    if override.endswith((".yaml", ".yml")):
        form = "a run has one YAML file, followed by arguments of the form section.key=value"
        return f"{echoed(override)} is a second YAML file, but {form}; remove it"
    message = f"override {echoed(override)!r} is not of the form section.key=value"
    next_value = following[0] if following and "=" not in following[0] else "VALUE"
    key, colon, value = override.partition(":")
    if override.startswith("~"):  # Hydra's form
        key, value = override[1:], "null"
    elif not colon or not key:
        key, _, value = override.partition(" ")
        if key not in keys:
            return message
    return f"{message}; write {echoed(f'{key}={value.strip() or next_value}')}"


def not_yaml(error: Exception, text: str) -> tuple[int | None, str]:
    """Returns the line of `text`, counted from 1, where it stops being valid YAML, and the reason. The line is None if
    it is unknown."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        if "set_int_max_str_digits" in str(error):
            return None, "it contains an integer of more than 4,300 digits; write a smaller number"
        return None, f"not readable as YAML ({one_line(error)})"
    line = error.problem_mark.line + 1
    problem = (error.problem or "").replace("did not find expected", "expected")
    brackets = UNCLOSED.get(error.context or "")
    if brackets and error.context_mark is not None:
        return error.context_mark.line + 1, f"{brackets} is not closed, or a comma is missing in it"
    duplicate = re.fullmatch("found duplicate key (.*)", problem)
    if duplicate:
        return line, f"the key {duplicate[1]} occurs twice; merge its two values"
    lines = text.splitlines()
    if line <= len(lines) and "\t" in lines[line - 1][: error.problem_mark.column + 1]:
        return line, "the line begins with a tab; indent YAML with spaces"
    return line, f"not readable as YAML ({problem})"


def not_applied(error: Exception) -> str:
    """Returns the reason why OmegaConf rejects an override, from the exception that it raised."""
    if "set_int_max_str_digits" in str(error):
        return "it contains an integer of more than 4,300 digits; write a smaller number"
    return echoed(str(error).splitlines()[0])  # the other lines name OmegaConf's internal types


def no_interpolation(error: Exception, keys: Sequence[str]) -> str:
    """Returns the error message for a `${...}` that OmegaConf cannot resolve. `keys`: all dotted keys of a
    configuration."""
    message = not_applied(error)
    variable = re.search("Environment variable '(.*)' not found", message)
    if variable:
        name = variable[1]
        return f"the environment variable {name} is not set; export it, or write ${{oc.env:{name},DEFAULT}}"
    unknown = re.fullmatch("Interpolation key '(.*)' not found", message)
    if unknown is None:
        return message
    near = difflib.get_close_matches(unknown[1], keys, n=1)
    hint = f"did you mean ${{{near[0]}}}?" if near else "set that key, or replace the interpolation with a value"
    return f"${{{unknown[1]}}} refers to a key that is not set; {hint}"


def invalid_value(where: str, item: ErrorDetails, model: type[BaseModel]) -> str:
    """Returns the error message for the value of the key `where` of a configuration of type `model`, from pydantic's
    error record `item`."""
    value = item["input"]
    kind = item["type"]
    where = echoed(where)
    if kind in ("model_type", "dict_type") and value is None:
        return f"the section {where} is empty; set one of its keys, or remove it"
    if kind in ("model_type", "dict_type"):
        text = "a list" if isinstance(value, list | tuple) else shortened(value)
        return f"{where} is {text} but must be a section; set one of its keys with {where}.KEY=VALUE"
    if kind in ("tuple_type", "list_type") and value is None:
        return f"{where} has no value; write [] for an empty list, or remove it"
    if kind in ("tuple_type", "list_type"):
        return f"{where} must be a list; write '{where}={listed(model, where.split('.'), value)}'"
    subject = f"{where} is {'empty' if value is None else shortened(value)}"
    key = re.sub(r"[.][0-9]+(?=[.]|$)", ".*", where)
    word = str(value).lower() if isinstance(value, str | bool) else ""
    meant = of_word(key, word) if kind == "literal_error" or isinstance(value, str) else None
    if meant is not None and not isinstance(meant, str):
        return f"{subject}: {meant.note}"
    message = item["msg"].removeprefix("Value error, ")
    sentence = f"{subject}: {message[0].lower()}{message[1:]}"
    if meant is not None:
        return f"{sentence}; did you mean {meant}?"
    if kind == "literal_error" and isinstance(value, str):
        choices = re.findall("'([^']*)'", item["ctx"]["expected"])
        near = [choice for choice in choices if choice.lower() == word]
        near = near or difflib.get_close_matches(word, choices, n=2)
        return f"{sentence}; did you mean {' or '.join(near)}?" if near else sentence
    return sentence.partition(", unable to parse")[0]
