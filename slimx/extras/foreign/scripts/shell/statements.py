"""Statements of a shell script: lists, pipelines, conditions and loops."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tree_sitter import Node

from slimx.extras.foreign.scripts.shell.arithmetic import truth
from slimx.extras.foreign.scripts.shell.builtins import Leave
from slimx.extras.foreign.scripts.shell.conditions import holds, inverted, matches, tested
from slimx.extras.foreign.scripts.shell.declarations import declared
from slimx.extras.foreign.scripts.shell.expansion import computed, without_unset
from slimx.extras.foreign.scripts.shell.syntax import check, text_in
from slimx.extras.foreign.scripts.shell.words import Words

_ROUNDS = 500
"""Maximum number of rounds of `while` and `until`; one that waits for something outside the script ends there."""
_COST = 100
"""Effort of a command, in characters."""
_WHOLE = frozenset(("command", "variable_assignment", "declaration_command", "unset_command", "test_command"))
"""Kinds of nodes that mean nothing if any part of them is not correct."""


@dataclass
class Statements(Words):
    """Runs compound commands, and keeps what they print."""

    functions: dict[str, Node] = field(default_factory=dict)
    outputs: list[str | None] = field(default_factory=list)
    """Texts that commands print; None for an unknown one."""
    inside: bool = False
    """True in a command substitution, whose commands are not recorded."""
    in_parentheses: bool = False
    """True in a subshell or a command substitution, which an error ends without ending the script."""
    substituted: bool | None = True
    """Status of the last command substitution of an assignment."""
    assumed: bool = False
    """Result of the condition of an `if` that is unknown."""

    @abstractmethod
    def command(self, node: Node) -> bool | None:
        """Runs a simple command, and returns its status; None if it is unknown."""

    @abstractmethod
    def redirected(self, node: Node) -> bool | None:
        """Runs a command with redirections, and returns its status."""

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
                return self.in_subshell(lambda: self.block(parts[1:-1]), in_parentheses=True)
            case "compound_statement" if text_in(parts[0]) == "((":
                return truth(self.arithmetic(node, parts[0].end_byte, parts[-1].start_byte))
            case "compound_statement" | "do_group":
                return self.block(parts)
            case "if_statement":
                return self.conditional(node)
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
            case "variable_assignment" | "variable_assignments":
                self.substituted = True
                for part in parts if node.type == "variable_assignments" else [node]:
                    self.assigned(part)
                return self.substituted
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
        elif status != (sign == "&&") and not (status is None and self.assumed):
            return status
        return self.statement(second)

    def pipeline(self, nodes: Sequence[Node]) -> bool | None:
        status = None
        for node in nodes:
            status = self.in_subshell(partial(self.statement, node))
        self.outputs.append(None)
        return status

    def in_subshell(self, action: Callable[[], bool | None], *, in_parentheses: bool = False) -> bool | None:
        """Runs `action` in a subshell, which cannot change variables of this one, and returns its status."""
        before = dict(self.values), dict(self.functions), self.folder, self.script, self.in_parentheses
        self.spend(len(self.values))
        self.in_parentheses |= in_parentheses
        try:
            return action()
        except Leave as left:
            if left.name in ("break", "continue"):
                raise
            return left.status
        finally:
            self.values, self.functions, self.folder, self.script, self.in_parentheses = before

    def conditional(self, node: Node) -> bool | None:
        """Runs the branch of `if` whose condition holds."""
        others = ("elif_clause", "else_clause")
        for clause in (node, *node.children):
            if clause != node and clause.type not in others:
                continue
            check(clause, self.script)
            parts = [part for part in clause.children if part.type not in others]
            then = next((place for place, part in enumerate(parts) if part.type == "then"), 0)
            holds = then == 0 or self.block(parts[1:then])  # `else` has no condition
            if self.assumed if holds is None else holds:
                return self.block(parts[then + 1 :])
        return True

    def case(self, node: Node) -> bool | None:
        """Runs the first item of `case` whose pattern matches, and those into which it falls through; with `assumed`,
        also those of which that is unknown."""
        value = without_unset(self.text(node.child_by_field_name("value")))
        status: bool | None = True
        falls = False
        for item in node.children:
            if item.type != "case_item":
                continue
            check(item, self.script)
            self.spend(len(value) * len(item.children) // 10)
            results = [matches(value, self.pattern(part)) for part in item.children_by_field_name("value")]
            taken = falls or True in results
            known = taken or None not in results
            if not (known or self.assumed):
                return None
            if taken or not known:
                start = next(place for place, part in enumerate(item.children) if part.type == ")")
                status = self.block(item.children[start + 1 :])
                end = text_in(item.children[-1])
                if known and end not in (";&", ";;&"):
                    break
                falls = end == ";&"
        return status

    def loop(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        for count, _ in enumerate(self.rounds(node)):
            if count == _ROUNDS and node.type == "while_statement":
                break
            self.spend(_COST)
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
        """Yields before every round of a loop: one for a word that is unknown, and one with what `read` sets."""
        first = text_in(node.children[0])
        if node.type == "while_statement":
            condition = node.children_by_field_name("condition")
            while (status := self.block(condition)) is (first == "while"):
                yield
            if status is None and any(re.search(r"\bread\b", text_in(part)) for part in condition):
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
                self.store(self.text(node.child_by_field_name("variable")), word)
                yield

    def operands(self, nodes: Sequence[Node]) -> list[str]:
        """Returns the words of a condition in `[`."""
        words = []
        for node in nodes:
            inner = node.type in ("binary_expression", "unary_expression", "parenthesized_expression")
            found = self.operands(node.children) if inner else self.fields(node)
            words += [word for word in found if "expansion" not in node.type or without_unset(word)]
        return words

    def output(self, node: Node) -> str:
        """Returns the output of a command substitution."""
        check(node, self.script)
        text = text_in(node)
        outer = self.outputs, self.inside
        self.outputs, self.inside = [], True
        self.substituted = self.in_subshell(lambda: self.block(node.children), in_parentheses=True)
        printed, (self.outputs, self.inside) = self.outputs, outer
        if None in printed or "\\`" in text:
            return computed(f"({text.strip('$()`')})")
        return "".join(filter(None, printed)).rstrip("\n")
