"""Words of a script: their quotes and expansions, without running anything.

A word that is expanded is a text with four signs: `_KEPT` before every character that is quoted, so that it neither
divides the word nor belongs to a pattern; `_CUT` before one that divides it where a command has words; `_EMPTY` for
quotes, which keep an empty word; `_NEXT` between two fields.
"""

from __future__ import annotations

import glob
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tree_sitter import Node

from slimx.extras.foreign.scripts.shell.arithmetic import calculated, key_of
from slimx.extras.foreign.scripts.shell.expansion import (
    ANY,
    END,
    EXTENDED,
    UNKNOWN,
    UNSET,
    Variables,
    computed,
    edited,
    element,
    next_key,
    numbered,
    unknown_in,
    without_unset,
)
from slimx.extras.foreign.scripts.shell.syntax import check, start_of, text_in

_KEPT, _EMPTY, _NEXT, _CUT = "\ue003", "\ue004", "\ue005", "\ue006"
_ALL = ("@", "*")
_BRACES = re.compile(rf"(?<!{_KEPT})\{{((?:[^{{}}{_KEPT}]|{_KEPT}.)*)\}}", re.DOTALL)
_SEVERAL = re.compile(rf"(?<!{_KEPT}),|^-?\w+\.\.")
"""Text in braces that makes several words of one, as {a,b} and {1..3} do."""

type Context = Literal["bare", "quoted"]
"""Surroundings of a text: nothing, or double quotes."""


@dataclass
class Words(Variables):
    """Expansion of the words of a script."""

    @abstractmethod
    def output(self, node: Node) -> str:
        """Returns the output of a command substitution."""

    def fields(self, *nodes: Node) -> list[str]:
        """Returns the fields that words expand to: several for an array, none for an empty variable."""
        fields = []
        for word in _NEXT.join(map(self.expanded, nodes)).split(_NEXT):
            if any(map(_SEVERAL.search, _BRACES.findall(word))):
                fields.append(computed(_plain(word)))
            else:
                fields += [_plain(field) for field in re.split(rf"(?s){_CUT}.|(?<!{_KEPT})\s", word) if field]
        self.spend(sum(map(len, fields)) + 50 * len(fields))
        return fields

    def text(self, node: Node | None) -> str:
        """Returns the value of a word where the shell does not split it, as in an assignment."""
        text = "" if node is None else _plain(self.expanded(node))
        self.spend(len(text))
        return text

    def pattern(self, node: Node) -> str:
        """Returns the pattern that a word is: its quoted parts match themselves."""
        return _pattern(self.expanded(node))

    def arithmetic(self, node: Node, start: int, end: int) -> str:
        """Returns the value of the expression between the bytes `start` and `end` of `node`."""
        return calculated(_plain(self._between(node, start, end, "quoted")), self)

    def document(self, node: Node) -> str:
        """Returns the text of a here-document."""
        raw, text = False, ""
        for part in node.children:
            if part.type == "heredoc_start":
                raw = bool(re.search(r"['\"\\]", text_in(part)))
            elif part.type == "heredoc_body" and raw:
                text = (part.text or b"").decode(errors="replace")
            elif part.type == "heredoc_body":
                text = _plain(self._between(part, part.start_byte, part.end_byte, "quoted"))
        return re.sub(r"(?m)^\t+", "", text) if text_in(node.children[0]) == "<<-" else text

    def assigned(self, node: Node) -> None:
        """Sets a variable as an assignment does."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        append = text_in(node.children[1]) == "+="
        name, key = self._element(target or node)
        if value is None or value.type != "array":
            self.store(name, self.text(value), key, append=append)
            return
        elements = dict(self.elements(name) or {}) if append else {}
        words = [word for word in value.named_children if word.type != "comment"]
        place = next_key(elements)
        for word in words:
            pair = re.fullmatch(r"\[([^]]*)\]=(.*)", self.text(word), re.DOTALL) if text_in(word)[0] == "[" else None
            new = numbered(self.fields(word), place) if pair is None else {key_of(name, pair[1], self): pair[2]}
            place = place + len(new) if pair is None else next_key(new)
            elements |= new
        self.spend(5 * len(elements))
        self.values[name] = elements

    def expanded(self, node: Node, context: Context = "bare") -> str:
        """Returns the text of a word with its signs."""
        text = text_in(node)
        start, end = start_of(node), node.end_byte
        match node.type:
            case "string":
                return self._between(node, start + 1, end - 1, "quoted") or _EMPTY * (node.named_child_count == 0)
            case "raw_string":
                return _quoted(text if context == "quoted" else text[1:-1])
            case "ansi_c_string":
                return _quoted(text[2:-1].encode("latin-1", "backslashreplace").decode("unicode_escape", "replace"))
            case "simple_expansion":
                return self._values(text[1:], context)
            case "expansion":
                return self._parameter(node, context)
            case "arithmetic_expansion" | "command_substitution" if re.match(r"\$\(\(.*\)\)|\$\[", text, re.DOTALL):
                bracket = text[1] == "["
                return self._emitted([self.arithmetic(node, start + 3 - bracket, end - 2 + bracket)], context)
            case "command_substitution":
                return self._emitted([self.output(node)], context)
            case "process_substitution":
                return _quoted(computed(text))
        return self._between(node, node.start_byte, end, context)

    def _between(self, node: Node, start: int, end: int, context: Context) -> str:
        """Returns the text of `node` between two bytes of the script, with its signs."""
        check(node, self.script)
        source, base = node.text or b"", node.start_byte
        text = ""
        for child in node.children:
            expands = child.child_count or child.type in ("raw_string", "ansi_c_string")
            if expands and child.start_byte >= start and child.end_byte <= end:
                text += self._literal(source[start - base : start_of(child) - base], context)
                text += self.expanded(child, context)
                start = child.end_byte
        return text + self._literal(source[start - base : end - base], context)

    def _literal(self, source: bytes, context: Context) -> str:
        """Returns a text of the script with its signs: a character after a backslash stands for itself."""
        text = source.decode(errors="replace").replace("\\\n", "")
        if context == "quoted":
            return _quoted(re.sub(r"\\([$`\"\\])", r"\1", text)) if text else ""
        parts = re.split(r"(\\.|\$\w+|\$\{\w+\}|\".*?\")", text, flags=re.DOTALL)
        for place, part in enumerate(parts):
            if place % 2 and part[0] == "$":  # the grammar leaves variables and quotes in patterns as they are
                parts[place] = self._values(part.strip("${}"), context)
            elif place % 2:
                parts[place] = _quoted(part.strip('"') if part[0] == '"' else part[1])
        return "".join(parts)

    def _element(self, node: Node) -> tuple[str, str]:
        """Returns the name and the key of a variable or of an array with a subscript."""
        target, index = node.child_by_field_name("name"), node.child_by_field_name("index")
        name = text_in(target or node)
        if name in _ALL:
            return "@", name
        key = "0" if index is None else self.text(index)
        return name, key_of(name, key, self)

    def _values(self, name: str, context: Context, key: str = "0") -> str:
        """Returns the value of an element, or of all for the key `@` or `*`."""
        elements = self.elements("@" if name in _ALL else name)
        if name in _ALL or key in _ALL:
            return self._all(list((elements or {}).values()), context, name if name in _ALL else key)
        if elements is None and not (name.isdigit() and self.locals):  # a function's arguments are all known
            return self._emitted([UNSET + name + END], context)
        return self._emitted([element(elements, key)], context)

    def _all(self, values: Sequence[str], context: Context, key: str) -> str:
        """Returns values as fields of their own; quotes join them by the first character of IFS for the key `*`."""
        if key == "*" and context == "quoted":
            values = [element(self.elements("IFS"), "0")[:1].join(values)]
        return self._emitted(values, context)

    def _parameter(self, node: Node, context: Context) -> str:
        """Returns the text of `${...}` with its signs."""
        check(node, self.script)
        parts = node.children[1:-1]
        prefix = text_in(parts.pop(0)) if len(parts) > 1 and not parts[0].is_named else ""
        name, key = self._element(parts.pop(0))
        if prefix == "!":
            return self._emitted([computed(text_in(node))], context)
        elements = self.elements(name)
        values = [value for place, value in (elements or {}).items() if key in (place, *_ALL)]
        values = values or list(filter(None, [element(elements, ANY)]))
        self.spend(sum(map(len, values)) // 10)
        if prefix == "#":
            length = str(len(values) if key in _ALL else len("".join(values)))
            return self._emitted([computed("#" + name) if unknown_in("".join(values)) else length], context)
        if not parts:
            return self._values(name, context, key)
        sign, rest = text_in(parts[0]), (parts[0].end_byte, node.end_byte - 1)
        if sign.strip(":") not in ("-", "=", "+", "?"):
            if elements is None and key not in _ALL:
                return self._values(name, context)
            pattern = _pattern(self._between(node, *rest, "bare"))
            if sign[0] in ":@/" or (sign[0] in ",^" and pattern) or EXTENDED.search(pattern):
                return self._emitted([computed(text_in(node))], context)
            return self._all([edited(value, sign, pattern, self) for value in values], context, key)
        has = bool(values) and (sign[0] != ":" or bool(without_unset("".join(values))))
        if has and sign[-1] != "+":
            return self._all(values, context, key)
        if sign[-1] == "?":
            return self._emitted([UNSET + name + END], context)
        default = self._between(node, *rest, context) if sign[-1] != "+" or has else ""
        if sign[-1] == "=":
            self.store(name, _plain(default), key)
        return default or self._emitted([""], context)

    def _emitted(self, values: Sequence[str], context: Context) -> str:
        """Returns values as fields of their own; what is unknown in them is not divided, and the rest at IFS."""
        if context == "quoted":
            return _NEXT.join(map(_quoted, values))
        signs = element(self.elements("IFS"), "0")
        parts = rf"{UNKNOWN.pattern}|[{{}},\s{re.escape(signs)}]"
        return _NEXT.join(
            re.sub(parts, lambda found: _CUT + found[0] if found[0] in signs else _quoted(found[0]), value)
            for value in values
        )


def _quoted(text: str) -> str:
    return _EMPTY + re.sub(r"(\W)", rf"{_KEPT}\1", text)


def _plain(text: str) -> str:
    """Returns a text without its signs."""
    return re.sub(f"[{_KEPT}{_EMPTY}{_CUT}]", "", text.replace(_NEXT, " "))


def _pattern(text: str) -> str:
    return _plain(re.sub(_KEPT + "(.)", lambda kept: glob.escape(kept[1]), text, flags=re.DOTALL))
