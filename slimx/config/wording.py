"""Wording of refusals by what reads a configuration: YAML, OmegaConf, pydantic, and the shell in front of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError

from slimx.config.section import shortened

UNCLOSED = {"while parsing a flow mapping": "{...}", "while parsing a flow sequence": "[...]"}


def no_file(path: Path) -> str:
    """The sentence for a `path` that is no configuration file, with the file that was meant."""
    text = str(path)
    if "=" in path.name:
        return f"{text} is no configuration file; the YAML file comes first, as in FILE {text}"
    folder = path if path.is_dir() else path.parent
    there = sorted(each.name for each in folder.glob("*.y*ml")) if folder.is_dir() else []
    if path.is_dir():
        held = f"of {', '.join(there[:4])} in it" if there else "of a run"
        return f"{text} is a directory; give the YAML file {held}"
    stems = {Path(name).stem: name for name in there}
    near = difflib.get_close_matches(path.stem, stems, n=1)
    hint = f"did you mean {path.with_name(stems[near[0]])}?" if near else "give the path of a YAML file"
    return f"{text}: no such configuration file; {hint}"


def no_override(override: str, following: Sequence[str]) -> str:
    """The sentence for an `override` without a key and a value; `following`: the arguments after it."""
    if following and following[0].startswith("="):
        joined = "".join([override, *following[: 2 if following[0] == "=" else 1]])
        return f"override {override!r} has spaces around its '='; write {joined}"
    if override.endswith((".yaml", ".yml")):
        return f"{override}: a run is one YAML file, and what follows it has the form section.key=value; leave it out"
    key, colon, value = override.partition(":")
    told = f"override {override!r} is not of the form section.key=value"
    return f"{told}; write {key}={value.strip()}" if colon and key else told


def not_yaml(error: Exception, text: str) -> tuple[int | None, str]:
    """The line of `text`, from 1, at which it is not readable as YAML, where that is known, and what is wrong."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return None, f"not readable as YAML ({_one_line(error)})"
    line = error.problem_mark.line + 1
    problem = (error.problem or "").replace("did not find expected", "expected")
    if (brackets := UNCLOSED.get(error.context or "")) and error.context_mark is not None:
        return error.context_mark.line + 1, f"{brackets} is not closed, or lacks a comma"
    if duplicate := re.fullmatch("found duplicate key (.*)", problem):
        return line, f"{duplicate[1]} is there for the second time; join the two"
    lines = text.splitlines()
    if line <= len(lines) and "\t" in lines[line - 1][: error.problem_mark.column + 1]:
        return line, "begins with a tab; YAML is indented with spaces"
    return line, f"not readable as YAML ({problem})"


def not_applied(error: Exception) -> str:
    """The reason why OmegaConf does not take a value."""
    told = str(error).splitlines()[0]  # the rest names its own types
    return told.replace(
        "Cannot merge incompatible container types", "a mapping where the file has a list, or vice versa"
    )


def no_interpolation(error: Exception, keys: Sequence[str]) -> str:
    """The sentence for a `${...}` that stands for nothing; `keys`: those of a configuration."""
    told = not_applied(error)
    named = re.fullmatch("Interpolation key '(.*)' not found", told)
    if named is None:
        return told
    near = difflib.get_close_matches(named[1], keys, n=1)
    return f"${{{named[1]}}} is no key" + (f"; did you mean ${{{near[0]}}}?" if near else " that is set")


def value(where: str, item: Mapping[str, Any]) -> str:
    """The sentence for a value at the key `where` that pydantic refuses with `item`."""
    given, message = item["input"], item["msg"].removeprefix("Value error, ")
    if item["type"] in ("model_type", "dict_type") and given is None:
        return f"{where} is empty; give it keys, or leave it out"
    if item["type"] == "model_type":
        return f"{where} is {shortened(given)}, but a section; set one of its keys, as {where}.KEY=VALUE"
    told = f"{where} is {shortened(given)}: {message[0].lower()}{message[1:]}"
    if item["type"] == "literal_error" and isinstance(given, str):
        near = difflib.get_close_matches(given, re.findall("'([^']*)'", item["ctx"]["expected"]), n=2)
        return f"{told}; did you mean {' or '.join(near)}?" if near else told
    return told.partition(", unable to parse")[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
