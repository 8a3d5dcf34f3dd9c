"""The options of a launch command: flags with their values, or keys with theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimx.extras.foreign.scripts.shell.expansion import unknown_in

_STARTERS = re.compile(
    r"python[\d.]*|torchrun|accelerate|deepspeed|ray|swift|uv|nohup|time|exec|env|sudo|numactl|srun|mpirun|sbatch"
)
"""Programs that start the program in their arguments."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts the other framework."""

    program: str
    """Path of its script as the command has it, such as train.py, or its module, such as verl.trainer.main_ppo."""
    arguments: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Words before the program, such as those of `ray job submit` or `torchrun`."""
    broken: bool = False
    """True if the command ended before its flags, because a backslash is missing at the end of a line."""


def launch_of(
    commands: Sequence[list[str]], is_program: Callable[[str], bool], names: Collection[str] = ()
) -> Launch | None:
    """Returns the one of `commands` that starts a program for which `is_program` is true; None if there is none. Flags
    that follow it on lines of their own belong to it. `names`: of several commands, the one with the most of these
    flags is taken, and the last of those with as many."""
    found: list[Launch] = []
    rest: list[str] = []
    for words in reversed(commands):
        if words[0].startswith("--"):
            rest = [*words, *rest]
            continue
        starts = True  # the first word, or one after a program that starts others
        for at, word in enumerate(words):
            if starts and is_program(word):
                found.append(Launch(word, (*words[at + 1 :], *rest), tuple(words[:at]), bool(rest)))
                rest = []
                break
            starts = (starts and at > 0) or bool(_STARTERS.fullmatch(Path(word).name) or unknown_in(word))
    return max(found, key=lambda launch: len(flags_of(launch.arguments).keys() & set(names)), default=None)


def flags_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of every flag in `arguments` by its name, with underscores and without its leading dashes; a
    flag without a value has none. The last one counts if a flag is repeated."""
    flags: dict[str, list[str]] = {}
    name = None
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [value] if equals else []
        elif name is not None:
            flags[name].append(word)
    return flags


def keys_of(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the value of every override of Hydra in `arguments` (`key=value`, `+key=value`) by its dotted key, and
    the words that are none; null for a key that `~` removes. The last one counts if a key is repeated."""
    keys, others = {}, []
    for word in arguments:
        removed = word.startswith("~")
        key, equals, value = word.lstrip("+~").partition("=")
        if (equals or removed) and re.fullmatch(r"\w[\w./@-]*", key):
            keys[key] = "null" if removed else value
        else:
            others.append(word)
    return keys, others
