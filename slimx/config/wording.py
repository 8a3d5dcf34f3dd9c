"""Wording of refusals by what reads a configuration: YAML, OmegaConf, pydantic, and the shell in front of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError

from slimx.config.foreign_names import of_word
from slimx.config.section import echoed, shortened

UNCLOSED = {"while parsing a flow mapping": "{...}", "while parsing a flow sequence": "[...]"}


def no_file(path: Path) -> str:
    """The sentence for a `path` that is no configuration file, with the file that was meant."""
    text = echoed(str(path))
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


def no_sections(path: Path, tree: Any, sections: Collection[str]) -> str | None:
    """The reason why a `tree` of YAML is none of a run's `sections`; None: it may be one."""
    if isinstance(tree, Mapping) and not tree:
        return "holds nothing; begin with a copy of configs/moe/quickstart.yaml"
    if not isinstance(tree, Mapping) or not any(value is not None for value in tree.values()):
        return "holds no sections; a configuration is a mapping of sections such as `run:`"
    if path.suffix not in (".yaml", ".yml") and not tree.keys() & set(sections):
        return (
            f"holds no section of a run, and its name ends in {path.suffix or path.name}; give the YAML file of a run"
        )
    return None


def no_override(override: str, following: Sequence[str], keys: Sequence[str]) -> str:
    """The sentence for an `override` without a key and a value; `following`: the arguments after it, `keys`: those of
    a configuration."""
    if following and following[0].startswith("="):
        joined = "".join([override, *following[: 2 if following[0] == "=" else 1]])
        return f"override {echoed(override)!r} has spaces around its '='; write {echoed(joined)}"
    if override.endswith((".yaml", ".yml")):
        form = "a run is one YAML file, and what follows it has the form section.key=value"
        return f"{echoed(override)}: {form}; leave it out"
    key, colon, value = override.partition(":")
    told = f"override {echoed(override)!r} is not of the form section.key=value"
    if colon and key:
        value = value.strip() or (following[0] if following and "=" not in following[0] else "VALUE")
        return f"{told}; write {echoed(f'{key}={value}')}"
    key, _, value = override.partition(" ")
    if key in keys and value.strip():
        return f"{told}; write {echoed(f'{key}={value.strip()}')}"
    if override in keys:
        value = following[0] if following and "=" not in following[0] else "VALUE"
        return f"{told}; write {echoed(f'{override}={value}')}"
    return told


def not_yaml(error: Exception, text: str) -> tuple[int | None, str]:
    """The line of `text`, from 1, at which it is not readable as YAML, where that is known, and what is wrong."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        if "set_int_max_str_digits" in str(error):
            return None, "a whole number in it has more than 4,300 digits"
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
    if "set_int_max_str_digits" in str(error):
        return "a whole number in it has more than 4,300 digits"
    return echoed(str(error).splitlines()[0])  # the rest names its own types


def no_interpolation(error: Exception, keys: Sequence[str]) -> str:
    """The sentence for a `${...}` that stands for nothing; `keys`: those of a configuration."""
    told = not_applied(error)
    if variable := re.search("Environment variable '(.*)' not found", told):
        name = variable[1]
        return f"the environment variable {name} is not set; export it, or write ${{oc.env:{name},DEFAULT}}"
    named = re.fullmatch("Interpolation key '(.*)' not found", told)
    if named is None:
        return told
    near = difflib.get_close_matches(named[1], keys, n=1)
    return f"${{{named[1]}}} is no key" + (f"; did you mean ${{{near[0]}}}?" if near else " that is set")


def value(where: str, item: Mapping[str, Any]) -> str:
    """The sentence for a value at the key `where` that pydantic refuses with `item`."""
    given, message, kind = item["input"], item["msg"].removeprefix("Value error, "), item["type"]
    where = echoed(where)
    if kind in ("model_type", "dict_type") and given is None:
        return f"{where} is empty; give it keys, or leave it out"
    if kind in ("model_type", "dict_type"):
        what = "a list" if isinstance(given, list | tuple) else shortened(given)
        return f"{where} is {what}, and must be a section; set one of its keys, as {where}.KEY=VALUE"
    if kind in ("tuple_type", "list_type") and given is None:
        return f"{where} is empty; write [] for no entry, or leave it out"
    if kind in ("tuple_type", "list_type"):
        one = "[{KEY: VALUE}]" if isinstance(given, dict) else f"[{shortened(given)}]"
        return f"{where} must be a list; write {where}={one}"
    told = f"{where} is {'empty' if given is None else shortened(given)}"
    key = re.sub(r"[.][0-9]+(?=[.]|$)", ".*", where)
    word = str(given).lower() if isinstance(given, str | bool) else ""
    meant = of_word(key, word) if kind == "literal_error" or isinstance(given, str) else None
    if meant is not None and not isinstance(meant, str):
        return f"{told}: {meant.note}"
    told += f": {message[0].lower()}{message[1:]}"
    if meant is not None:
        return f"{told}; did you mean {meant}?"
    if kind == "literal_error" and isinstance(given, str):
        choices = re.findall("'([^']*)'", item["ctx"]["expected"])
        near = [each for each in choices if each.lower() == word] or difflib.get_close_matches(word, choices, n=2)
        return f"{told}; did you mean {' or '.join(near)}?" if near else told
    return told.partition(", unable to parse")[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
