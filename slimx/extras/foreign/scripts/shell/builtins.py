"""Commands of a shell whose effect is known: what they print, and what `read` and `cd` set."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from slimx.extras.foreign.scripts.shell.expansion import Variables, unknown_in

SUCCEEDING = (
    "mkdir",
    "rm",
    "cp",
    "mv",
    "ln",
    "chmod",
    "touch",
    "sleep",
    "ulimit",
    "wait",
    "conda",
    "pip",
    "pip3",
    "uv",
)
"""Commands that a script expects to succeed; the status of any other is unknown."""
_FILE_SIZE = 1 << 20
"""Maximum number of bytes of a file that is read."""
_FORMAT = re.compile(r"%0?\d{0,2}[sd]|%%")


def printed_by(words: Sequence[str], variables: Variables, stdin: str | None) -> str | None:
    """Returns the output of a command that only computes a text; None for any other. `stdin`: its here-document."""
    arguments = [word for word in words[1:] if word != "--"]
    match words[0], arguments:
        case "echo", _:
            while arguments and re.fullmatch(r"-[neE]+", arguments[0]):
                arguments = arguments[1:]
            return " ".join(arguments) + "\n"
        case "printf", [form, *values]:
            return formatted(form, values)
        case "pwd", _:
            return variables.folder
        case "cat", []:
            return stdin
        case "dirname", [path]:
            return os.path.dirname(path.rstrip("/")) or "."
        case "basename", [path, *suffix]:
            return os.path.basename(path.rstrip("/")).removesuffix("".join(suffix))
        case (("realpath" | "readlink"), [*_, path]):
            return path
        case "seq", [*_, last] if all(re.fullmatch(r"-?\d{1,9}", word) for word in arguments):
            first = int(arguments[0]) if len(arguments) > 1 else 1
            step = int(arguments[1]) if len(arguments) == 3 else 1
            numbers = range(first, int(last) + (1 if step > 0 else -1), step or 1)
            variables.spend(len(numbers))
            return "\n".join(str(number) for number in numbers)
    return None


def formatted(form: str, values: Sequence[str]) -> str | None:
    """Returns what `printf` makes of `values`; None for a format that is not of texts and integers."""
    form = form.replace("\\n", "\n").replace("\\t", "\t")
    signs = [sign for sign in _FORMAT.findall(form) if sign != "%%"]
    if "%" in _FORMAT.sub("", form):
        return None
    parts = []
    for start in range(0, len(values) or 1, len(signs) or len(values) or 1):
        given = iter(values[start:])
        try:
            parts.append(form % tuple(int(next(given, "0")) if sign[-1] == "d" else next(given, "") for sign in signs))
        except ValueError:
            return None
    return "".join(parts)


def read_into(arguments: Sequence[str], variables: Variables, stdin: str | None) -> bool | None:
    """Sets the variables that `read` names to the words of `stdin`. Returns its status."""
    if stdin is None:
        return None
    options = "".join(word[1:] for word in arguments if word.startswith("-"))
    names = [word for word in arguments if re.fullmatch(r"[A-Za-z_]\w*", word)] or ["REPLY"]
    text = stdin.strip("\n") if "d" in options else stdin.partition("\n")[0]
    sign = (variables.elements("IFS") or {}).get("0")
    fields = [text] if unknown_in(text) or sign == "" else text.split(sign)
    if "a" in options:
        variables.values[names[0]] = {} if unknown_in(text) else {str(place): word for place, word in enumerate(fields)}
        return True
    fields[len(names) - 1 :] = [(sign or " ").join(fields[len(names) - 1 :])]
    for name, value in zip(names, [*fields, *[""] * len(names)], strict=False):
        variables.assign(name, value)
    return True


def change_folder(arguments: Sequence[str], variables: Variables) -> None:
    """Changes the working directory as `cd` does."""
    path = next((word for word in arguments if word not in ("--", "-P", "-L")), "~")
    variables.folder = path if path.startswith("~") else os.path.normpath(os.path.join(variables.folder, path))


def read_file(name: str, folder: str) -> tuple[Path, str] | None:
    """Returns the path and the text of a file, which is looked for in `folder` and here; None if there is none."""
    for start in (folder, ""):
        path = os.path.join(os.path.expanduser(start), os.path.expanduser(name))
        with contextlib.suppress(OSError):
            if os.path.isfile(path) and os.path.getsize(path) <= _FILE_SIZE:
                return Path(path), Path(path).read_text(errors="replace")
    return None
