"""Commands of a shell whose effect is known: what they print, and the folder that `cd` sets."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence

from slimx.extras.foreign.scripts.shell.expansion import Variables, unknown_in

EXPECTED_TO_SUCCEED = re.compile("mkdir|rm|cp|mv|ln|chmod|touch|sleep|ulimit|wait|conda|pip3?|uv")
"""Commands that a script expects to succeed; the status of any other is unknown."""


class Leave(Exception):
    """Leaves a loop, a function or the script."""

    def __init__(self, name: str, count: int = 1, status: bool | None = True) -> None:
        self.name = name
        self.count = count
        self.status = status


def leave(name: str, word: str, status: bool | None, *, subshell: bool) -> bool | None:
    """Leaves a loop, a function, a subshell or the script; a script that ends in an error is read on. `status`: of the
    last command."""
    if name in ("break", "continue"):
        raise Leave(name, int(word) if re.fullmatch(r"[0-9]{1,9}", word) else 1)
    if word:
        status = None if unknown_in(word) else word == "0"
    if name == "exit" and status is False and not subshell:
        return False
    raise Leave(name, status=status)


def printed_by(words: Sequence[str], variables: Variables, stdin: str | None) -> str | None:
    """Returns the output of a command that only computes a text; None for any other. `stdin`: its here-document."""
    arguments = [word for word in words[1:] if word != "--"]
    match words[0], arguments:
        case "echo", _:
            options = "".join(itertools.takewhile(re.compile("-[neE]+").fullmatch, words[1:]))
            text = " ".join(words[1 + options.count("-") :])
            return None if "e" in options and "\\" in text else text + "\n" * ("n" not in options)
        case "printf", [form, *values] if re.fullmatch(r"([^%\\]|%s)*", form) and form.count("%s") == len(values):
            return form % (*values,)
        case "pwd", _:
            return f"{variables.folder}\n"
        case "cat", []:
            return stdin
        case "dirname", [path]:
            return f"{os.path.dirname(path.rstrip('/')) or '.'}\n"
        case "basename", [path, *suffix] if path[:1] != "-" and len(suffix) < 2:
            return f"{os.path.basename(path.rstrip('/')).removesuffix(''.join(suffix))}\n"
        case (("realpath" | "readlink"), [*_, path]):
            return f"{path}\n"
        case "seq", [*_, last] if re.fullmatch(r"(-?\d{1,9} ){1,3}", " ".join([*arguments, ""])):
            first, step = [*map(int, arguments[:-1]), 1, 1][:2]
            numbers = range(first, int(last) + (-1) ** (step < 0), step or 1)
            variables.spend(len(numbers))
            return "".join(f"{number}\n" for number in numbers)
    return None


def change_folder(arguments: Sequence[str], variables: Variables) -> None:
    """Changes the working directory as `cd` does."""
    path = next((word for word in arguments if word not in ("--", "-P", "-L")), "~")
    variables.folder = path if path.startswith("~") else os.path.normpath(os.path.join(variables.folder, path))
