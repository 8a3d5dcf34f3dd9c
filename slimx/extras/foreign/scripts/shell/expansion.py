"""Expansion of a shell script's words: variables, arrays, quotes and arithmetic, without running anything."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slimx.extras.foreign.scripts.shell.tokens import part_end

UNSET, COMPUTED, END = "\ue000", "\ue001", "\ue002"
"""Signs (of Unicode's private use area) around the name of a variable without a value, or around the text of a command
whose output is unknown."""
_UNKNOWN = re.compile(f"[{UNSET}{COMPUTED}]([^{END}]*){END}")
_NAME = re.compile(r"\w+|[@*#?$!-]")
_PARAMETER = re.compile(r"(?P<length>#?)(?P<name>!?\w+|[@*])(?:\[(?P<index>[^]]*)\])?(?P<rest>.*)", re.DOTALL)
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
_ARITHMETIC: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def unknown_in(text: str) -> list[str]:
    """Returns the names of the variables, and the commands, whose values `text` needs and does not have."""
    return _UNKNOWN.findall(text)


def without_unset(text: str) -> str:
    """Returns `text` as the shell sees it: variables that are not set are empty."""
    return re.sub(f"{UNSET}[^{END}]*{END}", "", text)


def without_outputs(text: str) -> str:
    """Returns `text` without outputs of commands, which are unknown, and the signs that join them to the rest."""
    return re.sub(f"[-_]?{COMPUTED}[^{END}]*{END}[-_]?", "", text)


def shown(text: str) -> str:
    """Returns `text` with `$NAME` for every unknown value."""
    return _UNKNOWN.sub(lambda match: f"${match[1]}", text)


@dataclass(slots=True)
class Variables:
    """Variables of a script."""

    script: Path
    overrides: Mapping[str, str]
    """Values that the user gave; the script does not change them."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """Values by name; a variable that is no array has one."""

    def get(self, name: str) -> list[str] | None:
        """Returns the value of the variable `name`; None if it is not set."""
        if name in self.overrides:
            return [self.overrides[name]]
        return self.values.get(name)

    def assign(self, name: str, values: list[str], *, append: bool = False, array: bool = False) -> None:
        """Sets the variable `name` to `values`. `append`: add to what it has."""
        before = self.values.get(name, [])
        if append and not array:
            values = ["".join(before[:1]) + "".join(values)]
        self.values[name] = [*before, *values] if append and array else values


def expanded(raw: str, variables: Variables) -> list[str]:
    """Returns the fields that the word `raw` expands to: several for an array, none for an empty variable."""
    fields = [""]
    kept = False  # a quotation keeps an empty field
    index = 0
    while index < len(raw):
        end = part_end(raw, index)
        part = raw[index:end]
        if part.startswith("$") and part[1:2] not in ("(", "{"):
            name = _NAME.match(raw, index + 1)
            end = index + 1 if name is None else name.end()
            if name is not None and name[0][0].isdigit():
                end = index + 2
            part = raw[index:end]
        if part[0] == "'":
            fields[-1] += part[1:-1]
            kept = True
        elif part[0] == '"':
            inner = _quoted(part[1:-1], variables)
            kept = kept or bool(inner)
            _join(fields, inner)
        elif part[0] == "\\":
            fields[-1] += part[1:]
        elif part[0] == "$" and len(part) > 1:
            words = [word for value in substituted(part, variables) for word in _split(value)]
            _join(fields, words)
        elif part == "~" and index == 0:
            fields[-1] += "~"
        else:
            fields[-1] += part
        index = end
    return fields if kept or fields != [""] else []


def text_of(raw: str, variables: Variables) -> str:
    """Returns the value of `raw` where the shell does not split it, as in an assignment."""
    if not raw:
        return ""
    parts = []
    index = 0
    while index < len(raw):
        end = part_end(raw, index)
        if raw[index] == "$" and raw[index + 1 : index + 2] not in ("(", "{"):
            name = _NAME.match(raw, index + 1)
            end = index + 1 if name is None else name.end()
        part = raw[index:end]
        if part[0] == "$" and len(part) > 1:
            parts.append(" ".join(substituted(part, variables)))
        else:
            parts.append(" ".join(expanded(part, variables)) if part.strip() else part)
        index = end
    return "".join(parts)


def _split(value: str) -> list[str]:
    """Returns the words of `value`; unknown values in it are not divided."""
    if not unknown_in(value):
        return value.split()
    return [value]


def _join(fields: list[str], words: list[str]) -> None:
    if words:
        fields[-1] += words[0]
        fields += words[1:]


def _quoted(text: str, variables: Variables) -> list[str]:
    """Returns the fields of a text in double quotes: one, except for `"${ARRAY[@]}"`."""
    fields = [""]
    if not text:
        return fields
    alone = re.fullmatch(r"\$\{\w+\[@\]\}|\$@", text)
    if alone is not None:
        return substituted(text, variables)
    index = 0
    while index < len(text):
        sign = text[index]
        if sign == "\\" and text[index + 1 : index + 2] in ('"', "$", "\\", "`"):
            fields[-1] += text[index + 1]
            index += 2
            continue
        end = part_end(text, index) if sign in "$`" else index + 1
        if sign == "$" and text[index + 1 : index + 2] not in ("(", "{"):
            name = _NAME.match(text, index + 1)
            end = index + 1 if name is None else name.end()
        part = text[index:end]
        if len(part) > 1:
            values = substituted(part, variables)
            if re.search(r"\[@\]\}$", part):
                _join(fields, values)
            else:
                fields[-1] += " ".join(values)
        else:
            fields[-1] += part
        index = end
    return fields


def substituted(part: str, variables: Variables) -> list[str]:
    """Returns the values of an expansion: `$NAME`, `${...}`, `$(...)`, `$((...))` or a command in backquotes."""
    if part.startswith("$((") and part.endswith("))"):
        return [arithmetic(part[3:-2], variables)]
    if part.startswith("$("):
        return _output(part[2:-1], variables)
    if part.startswith("`"):
        return _output(part[1:-1], variables)
    if part.startswith("${"):
        return _parameter(part[2:-1], variables)
    return _value(part[1:], variables)


def _value(name: str, variables: Variables) -> list[str]:
    found = variables.get(name)
    if found is not None:
        return found
    if name in ("@", "*"):
        return []
    standard = {"HOME": "~", "PWD": ".", "#": "0", "0": str(variables.script)}
    return [standard.get(name, f"{UNSET}{name}{END}")]


def _parameter(text: str, variables: Variables) -> list[str]:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        return [f"{COMPUTED}{text}{END}"]
    name, index, rest = match["name"], match["index"], match["rest"]
    if name == "BASH_SOURCE":
        return [str(variables.script)]
    if name.startswith("!"):
        return [f"{COMPUTED}{text}{END}"]
    found = variables.get(name)
    if match["length"]:
        return [str(len(found or []) if index in ("@", "*") else len("".join(found or [])))]
    default = _DEFAULT.fullmatch(rest)
    if default is not None:
        has = found is not None and (not default[1] or any(found))
        if default[2] == "+":
            return [text_of(default[3], variables)] if has else [""]
        if has and found is not None:
            return found
        if default[2] == "?":
            return [f"{UNSET}{name}{END}"]
        value = text_of(default[3], variables)
        if default[2] == "=":
            variables.assign(name, [value])
        return [value]
    if index in ("@", "*"):
        values = found or []
    elif found is None:
        values = _value(name, variables)
    else:
        position = int(index) if index and index.isdigit() else 0
        values = found[position : position + 1]
    return [_edited(value, rest, variables) for value in values] if rest else values


def _edited(value: str, rest: str, variables: Variables) -> str:
    """Returns `value` changed by the end of a parameter expansion, such as `%.sh`, `##*/`, `//a/b` or `,,`."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    removed = re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)
    if removed is not None:
        return _without(value, removed[1], text_of(removed[2], variables))
    replaced = re.fullmatch(r"(//?)((?:[^/\\]|\\.)*)/?(.*)", rest, re.DOTALL)
    if replaced is not None:
        old, new = text_of(replaced[2], variables), text_of(replaced[3], variables)
        return value.replace(old, new, -1 if replaced[1] == "//" else 1)
    return f"{COMPUTED}{value}{rest}{END}"


def _without(value: str, sign: str, pattern: str) -> str:
    """Returns `value` without the part at its start (`#`) or end (`%`) that matches `pattern`: the shortest, or the
    longest if the sign is doubled."""
    ends = range(len(value) + 1)
    for end in reversed(ends) if len(sign) == 2 else ends:
        cut = value[:end] if sign[0] == "#" else value[len(value) - end :]
        if fnmatch.fnmatchcase(cut, pattern):
            return value[end:] if sign[0] == "#" else value[: len(value) - end]
    return value


def _output(command: str, variables: Variables) -> list[str]:
    """Returns the output of the commands that only compute a text, and an unknown value for any other."""
    fallback = re.search(r"\|\|\s*echo\s+(\S+)\s*$", command)
    if fallback is not None:  # what the probed package or file is replaced with where it is missing
        return [text_of(fallback[1], variables)]
    if "BASH_SOURCE" in command or re.search(r"dirname.*\$\{?0", command):
        up = re.search(r'["/}]((?:/?\.\.)+)["/ ]', command)
        folder = variables.script.parent
        return [str(folder / up[1].strip("/")) if up else str(folder)]
    words = []
    for raw in re.findall(r"(?:\"[^\"]*\"|'[^']*'|\S)+", command):
        words += expanded(raw, variables)
    if words == ["pwd"]:
        return ["."]
    if words[:1] == ["echo"] and "|" not in words:
        return [" ".join(words[1:])]
    if words[:1] == ["basename"] and len(words) == 2:
        return [words[1].rstrip("/").rpartition("/")[2]]
    if words[:1] == ["dirname"] and len(words) == 2:
        return [words[1].rstrip("/").rpartition("/")[0]]
    if words[:1] == ["seq"] and all(re.fullmatch(r"-?\d+", word) for word in words[1:]) and 2 <= len(words) <= 4:
        numbers = [int(word) for word in words[1:]]
        first = numbers[0] if len(numbers) > 1 else 1
        step = numbers[1] if len(numbers) == 3 else 1
        return [str(number) for number in range(first, numbers[-1] + 1, step or 1)]
    if words[:1] == ["cd"] and words[-1:] == ["pwd"]:
        return [next((word for word in words[1:] if word != "--"), ".")]
    return [f"{COMPUTED}({command.strip()}){END}"]


def arithmetic(text: str, variables: Variables) -> str:
    """Returns the value of an arithmetic expression of integers, or an unknown value."""
    plain = " ".join(expanded(f'"{text}"', variables)) if "$" in text else text
    if unknown_in(plain):
        return plain
    try:
        return str(_computed(ast.parse(plain.strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return f"{COMPUTED}(({text})){END}"


def _computed(node: ast.expr, variables: Variables) -> int:
    """Returns the value of a parsed expression. Raises ValueError for anything but integers and their sums, products
    and comparisons."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return int("".join(variables.get(name) or ["0"]))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand, variables)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            return _ARITHMETIC[type(sign)](_computed(left, variables), _computed(right, variables))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _ARITHMETIC:
            return int(_ARITHMETIC[type(sign)](_computed(left, variables), _computed(right, variables)))
        case _:
            raise ValueError(ast.dump(node))
