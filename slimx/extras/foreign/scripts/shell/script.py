"""Reading of a shell script: the commands that it would run, found without running anything.

Variables, conditions, loops, functions, `eval` and files that it names are followed. The output of other programs is
unknown. Where a condition depends on it, `if` (by default) and `while` go on as if it were false, `case` takes no item,
and neither `&&` nor `||` runs what follows, except in `$(probe || echo 8)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tree_sitter import Node

from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.shell.arithmetic import calculated, truth
from slimx.extras.foreign.scripts.shell.builtins import (
    EXPECTED_TO_SUCCEED,
    Leave,
    change_folder,
    leave,
    printed_by,
)
from slimx.extras.foreign.scripts.shell.conditions import tested
from slimx.extras.foreign.scripts.shell.declarations import redirections
from slimx.extras.foreign.scripts.shell.expansion import ANY, COMPUTED, END, computed
from slimx.extras.foreign.scripts.shell.files import read_file
from slimx.extras.foreign.scripts.shell.statements import Statements
from slimx.extras.foreign.scripts.shell.syntax import check, parsed, text_in


def commands_of(
    script: Path,
    text: str,
    overrides: Mapping[str, str],
    files: dict[str, str] | None = None,
    *,
    assumed: bool = False,
) -> list[list[str]]:
    """Returns the words of every command that the script `text` of the file `script` would run, in order. `overrides`:
    values of variables that the user set, and of arguments by number. `files`: receives the texts that the script
    writes, by path. `assumed`: what the condition of an `if` is taken for if it is not known; if it is True, all items
    of a `case` and what follows `&&` and `||` run, too. Raises SlimxError if what it runs is not correct syntax, or has
    no end."""
    arguments = {name: overrides[name] for name in sorted(filter(str.isdigit, overrides), key=int)}
    variables = {name: value for name, value in overrides.items() if name not in arguments}
    shell = Shell(script, variables, {"@": arguments}, files={} if files is None else files, assumed=assumed)
    try:
        shell.run(text)
    except Leave:
        pass
    except RecursionError as error:
        raise SlimxError(
            f"{script} nests its commands too deeply; give a file with only the flags",
            code="foreign.nesting",
            about=str(script),
        ) from error
    return shell.commands


@dataclass
class Shell(Statements):
    """Runs the statements of a script and records its commands."""

    commands: list[list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the here-documents that the script writes into files."""

    def run(self, text: str) -> bool | None:
        """Runs the script `text`, and returns its status; None if it is unknown."""
        self.spend(10 * len(text))
        text = re.sub(rf"{COMPUTED}[^{END}]*{END}", computed("output"), text)  # a command in it is no part of the text
        root = parsed(text)
        check(root, self.script)
        return self.block(root.children)

    def redirected(self, node: Node) -> bool | None:
        """Runs a command with redirections, and keeps what it writes into a file."""
        body = node.child_by_field_name("body")
        stdin, target, append, extra = redirections(node, self)
        outer = self.outputs
        if target is not None:
            self.outputs = []
        status: bool | None = None
        if body is None:
            self.outputs.append(None)
        elif body.type == "command":
            status = self.command(body, extra, stdin)
        else:
            status = self.statement(body)
        if target is not None and None not in self.outputs:
            before = self.files.get(target, "") * append
            self.files[target] = before + "".join(filter(None, self.outputs))
        self.outputs = outer
        for document in node.children_by_field_name("redirect"):
            sign, following = (document.child_by_field_name(name) for name in ("operator", "right"))
            if sign is not None and following is not None:
                status = self.chained(status, text_in(sign), following)
            for part in document.children:
                if part.type == "pipeline":
                    status = self.pipeline(part.named_children)
        return status

    def command(self, node: Node, extra: Sequence[Node] = (), stdin: str | None = None) -> bool | None:
        """Runs a simple command. `extra`: its words after a redirection."""
        check(node, self.script, whole=True)
        self.substituted = True
        words = self.fields(*node.children_by_field_name("name"), *node.children_by_field_name("argument"), *extra)
        before = {}
        for part in node.children:
            if part.type == "variable_assignment":
                name = text_in(part).partition("=")[0].rstrip("+")
                before[name] = self.values.get(name)
                self.assigned(part)
        status = self.called(words, stdin) if words else self.substituted
        self.restore(before)
        return status

    def called(self, words: list[str], stdin: str | None) -> bool | None:
        """Runs the command `words`. Commands whose effect is not known are recorded."""
        name, rest = words[0], words[1:]
        if name in self.functions:
            return self.function(name, rest)
        if name in ("command", "builtin", "exec") and rest and not rest[0].startswith("-"):
            return self.called(rest, stdin)
        script = None if name in ("echo", "printf") else self.script_in(words, stdin)
        if script is not None:
            path, text, arguments = script
            return self.in_subshell(lambda: self.with_arguments(lambda: self.run(text), arguments, path))
        match name:
            case "eval":
                return self.run(" ".join(rest))
            case "source" | ".":
                file = self.file("".join(rest[:1]))
                if file is not None:
                    return self.with_arguments(lambda: self.run(file[1]), rest[1:] or None, file[0])
                self.commands.append(words)
            case "exit" | "return" | "break" | "continue":
                return leave(name, "".join(rest[:1]), self.status, subshell=self.in_parentheses)
            case "shift" if re.fullmatch(r"[0-9]{1,9}", "".join(rest or "1")):
                self.set_arguments(list((self.elements("@") or {}).values())[int("".join(rest or "1")) :])
            case "set" if "--" in rest:
                self.set_arguments(rest[rest.index("--") + 1 :])
            case "cd":
                change_folder(rest, self)
            case "printf" if rest[:1] == ["-v"] and "".join(rest[1:2]).isidentifier():
                printed = printed_by(["printf", *rest[2:]], self, None)
                self.values[rest[1]] = {"0": computed(" ".join(words)) if printed is None else printed}
            case "read" | "mapfile" | "readarray":
                for variable in filter(str.isidentifier, rest):
                    self.values[variable] = {ANY: computed(" ".join(words))}
                return None
            case "let":
                return [truth(calculated(expression, self)) for expression in ["0", *rest]][-1]
            case "true" | "false" | ":" | "set" | "shopt" | "trap":
                return name != "false"
            case "[" | "test":
                return tested(rest[:-1] if name == "[" else rest, self)
            case _:
                printed = printed_by(words, self, stdin)
                self.outputs.append(printed)
                if printed is None and not self.inside:
                    self.commands.append(words)
                return True if printed is not None or EXPECTED_TO_SUCCEED.fullmatch(name) else None
        return True

    def function(self, name: str, arguments: Sequence[str]) -> bool | None:
        self.locals.append({})
        try:
            return self.with_arguments(lambda: self.statement(self.functions[name]), arguments, self.script)
        finally:
            self.restore(self.locals.pop())

    def with_arguments(
        self, action: Callable[[], bool | None], arguments: Sequence[str] | None, script: Path
    ) -> bool | None:
        """Runs `action` with arguments and the path of a file of its own."""
        outer, before = self.script, {"@": self.values.get("@")}
        self.script = script
        if arguments is not None:
            self.set_arguments(arguments)
        try:
            return action()
        except Leave as left:
            if left.name != "return":
                raise
            return left.status
        finally:
            self.script = outer
            if arguments is not None:
                self.restore(before)

    def script_in(self, words: Sequence[str], stdin: str | None) -> tuple[Path, str, Sequence[str]] | None:
        """Returns the file, the text and the arguments of the script that `bash` in a command runs; None if it is not
        known, or there is none."""
        while words and Path(words[0]).name not in ("bash", "sh"):
            words = words[1:]
        for place, word in enumerate(words[1:], 1):
            if re.fullmatch(r"-\w*c", word) and place + 1 < len(words):
                return self.script, words[place + 1], words[place + 3 :]
            if not word.startswith("-"):
                file = self.file(word)
                return None if file is None else (*file, words[place + 1 :])
        return (self.script, stdin, ()) if words and stdin is not None else None

    def file(self, name: str) -> tuple[Path, str] | None:
        """Returns the path and the text of a file that exists, or that the script wrote."""
        text = self.files.get(name)
        if text is None:
            return read_file(name, self.folder)
        return Path(name), text
