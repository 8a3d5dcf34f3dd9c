"""Reading of a shell script: the commands that it would run, found without running anything.

Variables, conditions, loops, functions, `eval` and files that it names are followed. The output of other programs is
unknown, and a condition on it counts as false.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tree_sitter import Node

from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.shell.arithmetic import calculated, truth
from slimx.extras.foreign.scripts.shell.builtins import (
    SUCCEEDING,
    Leave,
    change_folder,
    formatted,
    leave,
    printed_by,
    read_file,
    read_into,
)
from slimx.extras.foreign.scripts.shell.conditions import holds, inverted, matches, tested
from slimx.extras.foreign.scripts.shell.declarations import declared, redirections
from slimx.extras.foreign.scripts.shell.expansion import COMPUTED, END, computed, unknown_in, without_unset
from slimx.extras.foreign.scripts.shell.syntax import check, parsed, text_in
from slimx.extras.foreign.scripts.shell.words import Words

_NUMBERED = re.compile(rf"{COMPUTED}(\d+){END}")
_OUTPUT = re.compile(rf"{COMPUTED}(?!\d+{END})[^{END}]*{END}")
_ROUNDS = 500
"""Maximum number of rounds of a loop; one that waits for something outside the script ends there."""
_COST = 100
"""Effort of a command, in characters."""
_WHOLE = frozenset(("command", "variable_assignment", "declaration_command", "unset_command", "test_command"))
"""Kinds of nodes that mean nothing if any part of them is not correct."""


def commands_of(
    script: Path, text: str, overrides: Mapping[str, str], files: dict[str, str] | None = None
) -> list[list[str]]:
    """Returns the words of every command that the script `text` of the file `script` would run, in order. `overrides`:
    values of variables that the user set. `files`: receives the texts that the script writes, by path. Raises
    SlimxError if what it runs is not correct syntax, or has no end."""
    shell = _Shell(script, overrides, files={} if files is None else files)
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
class _Shell(Words):
    commands: list[list[str]] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the here-documents that the script writes into files."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Unknown outputs in the texts that are run, where numbers stand for them."""
    outputs: list[str | None] = field(default_factory=list)
    """Texts that commands print; None for an unknown one."""
    inside: bool = False
    """True in a command substitution, whose commands are not recorded."""

    def run(self, text: str) -> bool | None:
        """Runs the script `text`, and returns its status; None if it is unknown."""
        self.spend(10 * len(text))
        for value in set(_OUTPUT.findall(text)):  # a command in it is no part of the text
            number = str(len(self.unknown))
            self.unknown[number] = value
            text = text.replace(value, f"{COMPUTED}{number}{END}")
        root = parsed(text)
        check(root, self.script)
        return self.block(root.children)

    def known(self, word: str) -> str:
        """Returns `word` with the unknown outputs for which numbers stand in it."""
        return _NUMBERED.sub(lambda match: self.unknown.get(match[1], ""), word)

    def block(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if node.is_named and node.type not in ("comment", "heredoc_body", "heredoc_end"):
                status = self.status = self.statement(node)
        return status

    def statement(self, node: Node) -> bool | None:
        """Runs a command or compound command, and returns its status."""
        self.spend(_COST)
        check(node, self.script, whole=node.type in _WHOLE)
        parts = node.children
        match node.type:
            case "command":
                return self.command(node)
            case "redirected_statement":
                return self.redirected(node)
            case "list":
                return self.chained(self.statement(parts[0]), text_in(parts[1]), parts[2])
            case "pipeline":
                return self.pipeline(node.named_children)
            case "subshell":
                with self.apart():
                    return self.block(parts[1:-1])
            case "compound_statement" if text_in(parts[0]) == "((":
                return truth(self.arithmetic(node, parts[0].end_byte, parts[-1].start_byte))
            case "compound_statement" | "do_group" | "variable_assignments":
                return self.block(parts)
            case "if_statement":
                return self.choice(node)
            case "case_statement":
                return self.case(node)
            case "for_statement" | "while_statement" | "c_style_for_statement":
                return self.loop(node)
            case "negated_command":
                return inverted(self.statement(parts[1]))
            case "test_command" if text_in(parts[0]) == "[[":
                return holds(parts[1], self)
            case "test_command":
                return tested(self.operands(parts[1:-1]), self)
            case "variable_assignment":
                self.assigned(node)
                return True
            case "declaration_command" | "unset_command":
                return declared(node, self)
            case "function_definition":
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None and body is not None:
                    check(body, self.script)
                    self.functions[text_in(name)] = body
                return True
        return None

    def chained(self, status: bool | None, sign: str, second: Node) -> bool | None:
        """Runs the second command of `&&` or `||` if the status of the first asks for it."""
        self.status = status
        if status is None and sign == "||" and self.inside:
            self.outputs.clear()  # what a missing package or file is replaced with
        elif status != (sign == "&&"):
            return status
        return self.statement(second)

    def pipeline(self, nodes: Sequence[Node]) -> bool | None:
        status = None
        for node in nodes:
            with self.apart():
                status = self.statement(node)
        self.outputs.append(None)
        return status

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Runs the commands in the `with` block in a subshell, which cannot change variables of this one."""
        before = dict(self.values), dict(self.functions), self.folder, self.script
        self.spend(len(self.values))
        try:
            yield
        except Leave as left:
            if left.name in ("break", "continue"):
                raise
        finally:
            self.values, self.functions, self.folder, self.script = before

    def choice(self, node: Node) -> bool | None:
        """Runs the branch of `if` whose condition holds."""
        others = ("elif_clause", "else_clause")
        for clause in (node, *node.children):
            if clause != node and clause.type not in others:
                continue
            check(clause, self.script)
            parts = [part for part in clause.children if part.type not in others]
            then = next((place for place, part in enumerate(parts) if part.type == "then"), 0)
            if then == 0 or self.block(parts[1:then]):  # `else` has no condition
                return self.block(parts[then + 1 :])
        return True

    def case(self, node: Node) -> bool | None:
        """Runs the first item of `case` whose pattern matches."""
        value = without_unset(self.text(node.child_by_field_name("value")))
        if unknown_in(value):
            return None
        status: bool | None = True
        falls = False
        for item in node.children:
            if item.type != "case_item":
                continue
            check(item, self.script)
            patterns = map(self.pattern, item.children_by_field_name("value"))
            if falls or any(matches(value, pattern) for pattern in patterns):
                start = next(place for place, part in enumerate(item.children) if part.type == ")")
                status = self.block(item.children[start + 1 :])
                falls = text_in(item.children[-1]) == ";&"
                if text_in(item.children[-1]) not in (";&", ";;&"):
                    break
        return status

    def loop(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        for _ in itertools.islice(self.rounds(node), _ROUNDS):
            try:
                if body is not None:
                    self.statement(body)
            except Leave as left:
                left.count -= 1
                if left.name not in ("break", "continue") or left.count > 0:
                    raise
                if left.name == "break":
                    break
        return True

    def rounds(self, node: Node) -> Iterator[None]:
        """Yields before every round of a loop. Words that are unknown have none."""
        first = text_in(node.children[0])
        if node.type == "while_statement":
            while self.block(node.children_by_field_name("condition")) is (first == "while"):
                yield
        elif node.type == "c_style_for_statement":
            ends = [part for part in node.children if part.type in ("((", ";", "))")]
            self.arithmetic(node, ends[0].end_byte, ends[1].start_byte)
            while truth(self.arithmetic(node, ends[1].end_byte, ends[2].start_byte)):
                yield
                self.arithmetic(node, ends[2].end_byte, ends[3].start_byte)
        elif first == "for":
            values = self.fields(*node.children_by_field_name("value"))
            if text_in(node.children[2]) != "in":
                values = list((self.elements("@") or {}).values())
            for word in values:
                if not unknown_in(word):
                    self.store(self.text(node.child_by_field_name("variable")), word)
                    yield

    def operands(self, nodes: Sequence[Node]) -> list[str]:
        """Returns the words of a condition in `[`."""
        words = []
        for node in nodes:
            inner = node.type in ("binary_expression", "unary_expression", "parenthesized_expression")
            words += self.operands(node.children) if inner else self.fields(node)
        return words

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
            sign = document.child_by_field_name("operator")
            for part in document.children:
                if part.type == "pipeline":
                    status = self.pipeline(part.named_children)
                elif sign is not None and part == document.child_by_field_name("right"):
                    status = self.chained(status, text_in(sign), part)
        return status

    def command(self, node: Node, extra: Sequence[Node] = (), stdin: str | None = None) -> bool | None:
        """Runs a simple command. `extra`: its words after a redirection."""
        check(node, self.script, whole=True)
        words = self.fields(*node.children_by_field_name("name"), *node.children_by_field_name("argument"), *extra)
        before = {}
        for part in node.children:
            if part.type == "herestring_redirect":
                stdin = self.text(part.children[-1])
            elif part.type == "variable_assignment":
                name = text_in(part).partition("=")[0]
                before[name] = self.values.get(name)
                self.assigned(part)
        if not words:
            return True
        status = self.called(words, stdin)
        self.restore(before)
        return status

    def called(self, words: list[str], stdin: str | None) -> bool | None:
        """Runs the command `words`. Commands whose effect is not known are recorded."""
        name, rest = words[0], words[1:]
        if name in self.functions:
            return self.function(name, rest)
        if name in ("command", "builtin", "exec") and rest and not rest[0].startswith("-"):
            return self.called(rest, stdin)
        script = self.script_in(words, stdin)
        if script is not None:
            path, text, arguments = script
            with self.apart():
                return self.framed(lambda: self.run(text), arguments, path)
        match name:
            case "eval":
                return self.run(" ".join(rest))
            case "source" | ".":
                file = self.file("".join(rest[:1]))
                return file is None or self.framed(lambda: self.run(file[1]), rest[1:] or None, file[0])
            case "exit" | "return" | "break" | "continue":
                return leave(name, "".join(rest[:1]), self.status)
            case "shift" if re.fullmatch(r"[0-9]{1,9}", "".join(rest or "1")):
                self.set_arguments(list((self.elements("@") or {}).values())[int("".join(rest or "1")) :])
            case "set" if "--" in rest:
                self.set_arguments(rest[rest.index("--") + 1 :])
            case "cd":
                change_folder(rest, self)
            case "read":
                return read_into(rest, self, stdin)
            case "let":
                return calculated(",".join(rest), self) != "0"
            case "true" | "false" | ":" | "set" | "shopt" | "trap":
                return name != "false"
            case "[" | "test":
                return tested(rest[:-1] if name == "[" else rest, self)
            case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
                self.store(rest[1], formatted(rest[2], rest[3:]) or computed(" ".join(words)))
            case _:
                printed = printed_by(words, self, stdin)
                self.outputs.append(printed)
                if printed is None and not self.inside:
                    self.commands.append(list(map(self.known, words)))
                return True if printed is not None or name in SUCCEEDING else None
        return True

    def function(self, name: str, arguments: Sequence[str]) -> bool | None:
        self.locals.append({})
        try:
            return self.framed(lambda: self.statement(self.functions[name]), arguments, self.script)
        finally:
            self.restore(self.locals.pop())

    def framed(self, action: Callable[[], bool | None], arguments: Sequence[str] | None, script: Path) -> bool | None:
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

    def output(self, node: Node) -> str:
        """Returns the output of a command substitution."""
        check(node, self.script)
        text = text_in(node)
        outer = self.outputs, self.inside
        self.outputs, self.inside = [], True
        with self.apart():
            self.block(node.children)
        printed, (self.outputs, self.inside) = self.outputs, outer
        if None in printed or "\\`" in text:
            return computed(f"({text.strip('$()`')})")
        return "".join(filter(None, printed)).rstrip("\n")
