"""The options of a launch command: flags with their values, or keys with theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts the other framework."""

    program: str
    """Base name of its script, such as train.py, or its module, such as verl.trainer.main_ppo."""
    arguments: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Words before the program, such as those of `ray job submit` or `torchrun`."""
    broken: bool = False
    """True if the command ended before its flags, because a backslash is missing at the end of a line."""


def launch_of(commands: Sequence[list[str]], is_program: Callable[[str], bool]) -> Launch | None:
    """Returns the last of `commands` that has a word for which `is_program` is true; None if there is none. Flags that
    follow it on lines of their own belong to it."""
    for index in range(len(commands) - 1, -1, -1):
        words = commands[index]
        at = next((place for place, word in enumerate(words) if is_program(word)), None)
        if at is None:
            continue
        arguments = words[at + 1 :]
        rest = [command for command in commands[index + 1 :] if command[0].startswith("--")]
        for command in rest:
            arguments = [*arguments, *command]
        return Launch(Path(words[at]).name, tuple(arguments), tuple(words[:at]), bool(rest))
    return None


def flags_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of every flag in `arguments` by its name, with underscores and without its leading dashes; a
    flag without a value has none. The last one counts if a flag is repeated."""
    flags: dict[str, list[str]] = {}
    name = None
    for word in arguments:
        if word.startswith("--") and len(word) > 2 and not _NUMBER.fullmatch(word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [value] if equals else []
        elif name is not None:
            flags[name].append(word)
    return flags


def keys_of(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the value of every override of Hydra in `arguments` (`key=value`, `+key=value`) by its dotted key; null
    for a key that `~` removes. The last one counts if a key is repeated."""
    keys = {}
    for word in arguments:
        if word.startswith("~"):
            keys[word[1:].partition("=")[0]] = "null"
            continue
        key, equals, value = word.lstrip("+").partition("=")
        if equals and not word.startswith("-") and re.fullmatch(r"[\w./@]+", key):
            keys[key] = value
    return keys
