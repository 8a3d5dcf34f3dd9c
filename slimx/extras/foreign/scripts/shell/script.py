"""Reading of a shell script: the commands that it would run, found without running anything.

Variables, conditions, loops, functions, `eval` and files that it names are followed. The output of other programs is
unknown, and a condition on it counts as false.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tree_sitter import Node

from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.shell.arithmetic import calculated
from slimx.extras.foreign.scripts.shell.builtins import (
    SUCCEEDING,
    change_folder,
    formatted,
    printed_by,
    read_file,
    read_into,
)
from slimx.extras.foreign.scripts.shell.conditions import holds, inverted, matches, tested
from slimx.extras.foreign.scripts.shell.declarations import declared, redirections
from slimx.extras.foreign.scripts.shell.expansion import UNKNOWN, Variables, computed, unknown_in, without_unset
from slimx.extras.foreign.scripts.shell.syntax import check, parsed, text_in
from slimx.extras.foreign.scripts.shell.words import Words

_ROUNDS = 1000
"""Maximum number of rounds of a loop; one that waits for something outside the script ends there."""
_COST = 100
"""Effort of a command, in characters."""
_WHOLE = frozenset(("command", "variable_assignment", "declaration_command", "unset_command", "test_command"))
"""Kinds of nodes that mean nothing if any part of them is not correct."""


def commands_of(script: Path, text: str, overrides: Mapping[str, str]) -> list[list[str]]:
    """Returns the words of every command that the script `text` of the file `script` would run, in order. `overrides`:
    values of variables that the user set. Raises SlimxError if what it runs is not correct syntax, or has no end."""
    shell = _Shell(Variables(script, overrides))
    try:
        shell.run(text)
    except _Leave:
        pass
    except RecursionError as error:
        raise SlimxError(
            f"{script} nests its commands too deeply; give a file with only the flags",
            code="foreign.nesting",
            about=str(script),
        ) from error
    return shell.commands


class _Leave(Exception):
    """Leaves a loop, a function or the script."""

    def __init__(self, name: str, count: int = 1, status: bool | None = True) -> None:
        self.name = name
        self.count = count
        self.status = status


@dataclass(slots=True)
class _Shell:
    variables: Variables
    commands: list[list[str]] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the here-documents that the script writes into files."""
    outputs: list[str | None] = field(default_factory=list)
    """Texts that commands print; None for an unknown one."""
    inside: bool = False
    """True in a command substitution, whose commands are not recorded."""

    @property
    def words(self) -> Words:
        return Words(self.variables, self.output)

    def run(self, text: str) -> bool | None:
        """Runs the script `text`, and returns its status; None if it is unknown."""
        self.variables.spend(len(text))
        for value in set(UNKNOWN.findall(text)):  # quoted, since a command in it is no part of the text
            name = f"unknown_{len(self.variables.values)}"
            self.variables.values[name] = {"0": value}
            text = text.replace(value, f"${{{name}}}")
        root = parsed(text)
        check(root, whole=False)
        return self.block(root.children)

    def block(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if node.is_named and node.type not in ("comment", "heredoc_body", "heredoc_end"):
                status = self.variables.status = self.statement(node)
        return status

    def statement(self, node: Node) -> bool | None:
        """Runs a command or compound command, and returns its status."""
        self.variables.spend(_COST)
        check(node, whole=node.type in _WHOLE)
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
                value = self.words.arithmetic(node, parts[0].end_byte, parts[-1].start_byte)
                return None if value is None else value != 0
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
                return holds(parts[1], self.words)
            case "test_command":
                return tested([word for part in parts[1:-1] for word in self.operands(part)], self.variables)
            case "variable_assignment":
                self.words.assign(node)
                return True
            case "declaration_command" | "unset_command":
                return declared(node, self.words)
            case "function_definition":
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None and body is not None:
                    check(body, whole=False)
                    self.functions[text_in(name)] = body
                return True
        return None

    def chained(self, status: bool | None, sign: str, second: Node) -> bool | None:
        """Runs the second command of `&&` or `||` if the status of the first asks for it."""
        self.variables.status = status
        if status is None and sign == "||" and self.inside:
            self.outputs.clear()  # what a missing package or file is replaced with
        elif status is None or status != (sign == "&&"):
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
        variables = self.variables
        before = dict(variables.values), dict(self.functions), variables.folder, variables.script
        variables.spend(len(before[0]))
        try:
            yield
        except _Leave as leave:
            if leave.name in ("break", "continue"):
                raise
        finally:
            variables.values, self.functions, variables.folder, variables.script = before

    def choice(self, node: Node) -> bool | None:
        """Runs the branch of `if` whose condition holds."""
        others = ("elif_clause", "else_clause")
        for clause in [node, *(part for part in node.children if part.type in others)]:
            check(clause, whole=False)
            parts = [part for part in clause.children if part.type not in others]
            then = next((place for place, part in enumerate(parts) if part.type == "then"), 0)
            if then == 0 or self.block(parts[1:then]):  # `else` has no condition
                return self.block(parts[then + 1 :])
        return True

    def case(self, node: Node) -> bool | None:
        """Runs the first item of `case` whose pattern matches."""
        value = without_unset(self.words.text(node.child_by_field_name("value")))
        status: bool | None = True
        falls = False
        for item in node.children:
            if item.type != "case_item" or unknown_in(value):
                continue
            check(item, whole=False)
            patterns = [self.words.pattern(pattern) for pattern in item.children_by_field_name("value")]
            if falls or any(matches(value, pattern) for pattern in patterns):
                start = next(place for place, part in enumerate(item.children) if part.type == ")")
                status = self.block(item.children[start + 1 :])
                falls = text_in(item.children[-1]) == ";&"
                if text_in(item.children[-1]) not in (";&", ";;&"):
                    break
        return None if unknown_in(value) else status

    def loop(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        for _ in itertools.islice(self.rounds(node), _ROUNDS):
            try:
                if body is not None:
                    self.statement(body)
            except _Leave as leave:
                leave.count -= 1
                if leave.name not in ("break", "continue") or leave.count > 0:
                    raise
                if leave.name == "break":
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
            start, condition, update = [(a.end_byte, b.start_byte) for a, b in itertools.pairwise(ends[:4])]
            self.words.arithmetic(node, *start)
            while self.words.arithmetic(node, *condition):
                yield
                self.words.arithmetic(node, *update)
        elif first == "for":
            given = self.words.fields(*node.children_by_field_name("value"))
            if not any(part.type == "in" for part in node.children):
                given = list((self.variables.elements("@") or {}).values())
            for word in given:
                if not unknown_in(word):
                    self.variables.assign(self.words.text(node.child_by_field_name("variable")), word)
                    yield

    def operands(self, node: Node) -> list[str]:
        """Returns the words of a condition in `[`."""
        if node.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
            return [word for part in node.children for word in self.operands(part)]
        return self.words.fields(node)

    def redirected(self, node: Node) -> bool | None:
        """Runs a command with redirections, and keeps what it writes into a file."""
        body = node.child_by_field_name("body")
        documents = [part for part in node.children if part.type == "heredoc_redirect"]
        stdin, target, append, extra = redirections(node, self.words)
        outer = self.outputs
        self.outputs = outer if target is None else []
        status: bool | None = None
        if body is None:
            self.outputs.append(None)
        elif body.type == "command":
            status = self.command(body, extra, stdin)
        else:
            status = self.statement(body)
        if target is not None:
            before = self.files.get(target, "") if append else ""
            self.files[target] = before + "".join(part or "" for part in self.outputs)
        self.outputs = outer
        for own in documents:
            sign = own.child_by_field_name("operator")
            for part in own.children:
                if part.type == "pipeline":
                    status = self.pipeline(part.named_children)
                elif sign is not None and part == own.child_by_field_name("right"):
                    status = self.chained(status, text_in(sign), part)
        return status

    def command(self, node: Node, extra: Sequence[Node] = (), stdin: str | None = None) -> bool | None:
        """Runs a simple command. `extra`: its words after a redirection."""
        check(node, whole=True)
        parts = [part for field in ("name", "argument") for part in node.children_by_field_name(field)]
        words = self.words.fields(*parts, *extra)
        before = {}
        for part in node.children:
            if part.type == "herestring_redirect":
                stdin = self.words.text(part.children[-1])
            elif part.type == "variable_assignment":
                name = text_in(part).partition("=")[0]
                before[name] = self.variables.values.get(name)
                self.words.assign(part)
        if not words:
            return True
        status = self.called(words, stdin)
        self.variables.restore(before)
        return status

    def called(self, words: list[str], stdin: str | None) -> bool | None:
        """Runs the command `words`. Commands whose effect is not known are recorded."""
        name, rest = words[0], words[1:]
        if name in self.functions:
            return self.function(name, rest)
        if name in ("command", "builtin", "exec") and rest and not rest[0].startswith("-"):
            return self.called(rest, stdin)
        shell = next((place for place, word in enumerate(words) if Path(word).name in ("bash", "sh")), None)
        if shell is not None:
            script = self.script_in(words[shell + 1 :], stdin)
            if script is not None:
                with self.apart():
                    return self.within(*script)
        match name:
            case "eval":
                return self.run(" ".join(rest))
            case "source" | ".":
                file = self.file(rest[0]) if rest else None
                return True if file is None else self.within(*file, rest[1:])
            case "exit" | "return" | "break" | "continue":
                return self.leave(name, "".join(rest[:1]))
            case "shift" if "".join(rest[:1]).isdecimal() or not rest:
                self.variables.set_arguments(
                    list((self.variables.elements("@") or {}).values())[int(rest[0]) if rest else 1 :]
                )
            case "set" if "--" in rest:
                self.variables.set_arguments(rest[rest.index("--") + 1 :])
            case "cd":
                change_folder(rest, self.variables)
            case "read":
                return read_into(rest, self.variables, stdin)
            case "let":
                return [calculated(word, self.variables) for word in rest][-1:] != ["0"]
            case "true" | "false" | ":" | "set" | "shopt" | "trap":
                return name != "false"
            case "[" | "test":
                return tested(rest[:-1] if name == "[" else rest, self.variables)
            case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
                self.variables.assign(rest[1], formatted(rest[2], rest[3:]) or computed(" ".join(words)))
            case _:
                printed = printed_by(words, self.variables, stdin)
                self.outputs.append(printed)
                if printed is None and not self.inside:
                    self.commands.append(words)
                return True if printed is not None or name in SUCCEEDING else None
        return True

    def leave(self, name: str, word: str) -> bool | None:
        """Leaves a loop, a function or the script; a script that ends in an error is read on."""
        if name in ("break", "continue"):
            raise _Leave(name, int(word) if word.isdigit() else 1)
        status = self.variables.status if not word else None if unknown_in(word) else word == "0"
        if name == "exit" and status is False:
            return False
        raise _Leave(name, status=status)

    def function(self, name: str, arguments: Sequence[str]) -> bool | None:
        before = {"@": self.variables.values.get("@")}
        self.variables.set_arguments(arguments)
        self.variables.locals.append({})
        try:
            return self.statement(self.functions[name])
        except _Leave as leave:
            if leave.name != "return":
                raise
            return leave.status
        finally:
            self.variables.restore(self.variables.locals.pop() | before)

    def script_in(self, words: Sequence[str], stdin: str | None) -> tuple[Path, str, Sequence[str]] | None:
        """Returns the file, the text and the arguments of the script that `bash` runs with `words`; None if it is not
        known."""
        for place, word in enumerate(words):
            if re.fullmatch(r"-\w*c", word) and place + 1 < len(words):
                return self.variables.script, words[place + 1], words[place + 3 :]
            if not word.startswith("-"):
                file = self.file(word)
                return None if file is None else (*file, words[place + 1 :])
        return None if stdin is None else (self.variables.script, stdin, ())

    def file(self, name: str) -> tuple[Path, str] | None:
        """Returns the path and the text of a file that exists, or that the script wrote."""
        text = self.files.get(name)
        return read_file(name, self.variables.folder) if text is None else (Path(name), text)

    def within(self, script: Path, text: str, arguments: Sequence[str]) -> bool | None:
        """Runs the text of another file."""
        before = {"@": self.variables.values.get("@")} if arguments else {}
        outer = self.variables.script
        self.variables.script = script
        if arguments:
            self.variables.set_arguments(arguments)
        try:
            return self.run(text)
        except _Leave as leave:
            if leave.name != "return":
                raise
            return leave.status
        finally:
            self.variables.restore(before)
            self.variables.script = outer

    def output(self, node: Node) -> str:
        """Returns the output of a command substitution."""
        check(node, whole=False)
        text = text_in(node)
        outer = self.outputs, self.inside
        self.outputs, self.inside = [], True
        with self.apart():
            self.block(node.children)
        printed = [part for part in self.outputs if part is not None]
        known = len(printed) == len(self.outputs) and "\\`" not in text
        self.outputs, self.inside = outer
        if known:
            return "".join(printed).rstrip("\n")
        return computed(f"({text.removeprefix('$').strip('`')})" if text[0] == "`" else text[1:])
