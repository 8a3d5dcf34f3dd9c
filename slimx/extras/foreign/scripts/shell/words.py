"""Words of a script: their quotes and expansions, without running anything."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tree_sitter import Node

from slimx.extras.foreign.scripts.shell.arithmetic import calculated
from slimx.extras.foreign.scripts.shell.expansion import (
    END,
    UNSET,
    Variables,
    computed,
    edited,
    unknown_in,
    without_unset,
)
from slimx.extras.foreign.scripts.shell.syntax import check, start_of, text_in

_SPECIAL = frozenset(("@", "*"))
_FIRST = 0xF0000  # of the characters that stand for parts that are no literal text while braces are expanded

_PARTS = 1000
"""Maximum number of parts of a word in which braces are expanded."""


class Piece(NamedTuple):
    """Part of a word."""

    text: str
    kind: Literal["literal", "value", "quoted", "break"]
    """`literal` is text of the script; `value` is the value of an expansion, which is split at blanks; `quoted` is
    neither split nor a pattern; `break` is the end of a field."""


_BREAK = Piece(" ", "break")


@dataclass(slots=True)
class Words:
    """Expansion of the words of a script."""

    variables: Variables
    output: Callable[[Node], str]
    """Returns the output of a command substitution."""

    def fields(self, *nodes: Node) -> list[str]:
        """Returns the fields that words expand to: several for an array, none for an empty variable."""
        words: list[list[Piece]] = []
        for before, node in itertools.pairwise([None, *nodes]):
            pieces = self.pieces(node) if node is not None else []
            if before is not None and node is not None and before.end_byte == node.start_byte:
                words[-1] += pieces  # the grammar splits words at some signs
            else:
                words.append(pieces)
        fields = [field for word in words for pieces in _braces(word, self.variables) for field in _fields(pieces)]
        self.variables.spend(sum(len(field) + 20 for field in fields))
        return fields

    def text(self, node: Node | None) -> str:
        """Returns the value of a word where the shell does not split it, as in an assignment."""
        text = "" if node is None else _joined(self.pieces(node))
        self.variables.spend(len(text))
        return text

    def pattern(self, node: Node) -> str:
        """Returns the pattern that a word is: its quoted parts match themselves."""
        return _pattern(self.pieces(node))

    def expression(self, node: Node) -> str:
        """Returns the regular expression that a word is: its quoted parts match themselves."""
        parts = [
            re.escape(text) if kind == "quoted" else re.sub(r"\"(.*?)\"", lambda match: re.escape(match[1]), text)
            for text, kind in self.pieces(node, escapes=False)
        ]
        return "".join(parts)

    def pieces(self, node: Node, *, quoted: bool = False, escapes: bool = True) -> list[Piece]:
        """Returns the parts of a word. `quoted`: it is inside double quotes. `escapes`: a backslash outside quotes is
        not part of the word."""
        text = text_in(node)
        match node.type:
            case "string":
                inner = self._between(node, start_of(node) + 1, node.end_byte - 1, quoted=True)
                return inner if inner or node.named_child_count else [Piece("", "quoted")]
            case "raw_string":
                return [Piece(text if quoted else text[1:-1], "quoted")]
            case "ansi_c_string":
                return [Piece(_decoded(text[2:-1]), "quoted")]
            case "simple_expansion":
                return self._values(text[1:], quoted=quoted)
            case "expansion":
                return self._parameter(node, quoted=quoted)
            case "arithmetic_expansion" | "command_substitution" if re.match(r"\$\(\(.*\)\)|\$\[", text, re.DOTALL):
                ends = (3, 2) if text.startswith("$((") else (2, 1)
                inner = self._between(node, start_of(node) + ends[0], node.end_byte - ends[1], quoted=True)
                return _emitted([calculated(_joined(inner), self.variables)], quoted=quoted)
            case "command_substitution":
                return _emitted([self.output(node)], quoted=quoted)
            case "process_substitution":
                return [Piece(computed(text), "quoted")]
        return self._between(node, node.start_byte, node.end_byte, quoted=quoted, escapes=escapes)

    def arithmetic(self, node: Node, start: int, end: int) -> int | None:
        """Returns the value of the expression between the bytes `start` and `end` of `node`; None if it is unknown."""
        value = calculated(_joined(self._between(node, start, end, quoted=True)), self.variables)
        return None if unknown_in(value) else int(value)

    def document(self, node: Node) -> str:
        """Returns the text of a here-document."""
        start = next(child for child in node.children if child.type == "heredoc_start")
        body = next((child for child in node.children if child.type == "heredoc_body"), None)
        if body is None:
            return ""
        if re.search(r"['\"\\]", text_in(start)):
            return (body.text or b"").decode(errors="replace")
        return _joined(self._between(body, body.start_byte, body.end_byte, quoted=True))

    def assign(self, node: Node) -> str:
        """Carries out an assignment, and returns the name of its variable."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        append = any(child.type == "+=" for child in node.children)
        if target is None:
            return ""
        name, key = text_in(target), "0"
        if target.type == "subscript":
            name, key = self._element(target)
        if value is None or value.type != "array":
            self.variables.assign(name, self.text(value), key, append=append)
            return name
        elements = dict((self.variables.elements(name) or {}) if append else {})
        words = [word for word in value.named_children if word.type != "comment"]
        pairs = [re.fullmatch(r"\[(.*?)\]=(.*)", self.text(word), re.DOTALL) for word in words]
        if any(pairs):
            elements |= {pair[1]: pair[2] for pair in pairs if pair is not None}
        else:
            first = 1 + max((int(key) for key in elements if key.isdigit()), default=-1)
            elements |= {str(place): field for place, field in enumerate(self.fields(*words), first)}
        self.variables.spend(len(elements))
        self.variables.values[name] = elements
        return name

    def _between(self, node: Node, start: int, end: int, *, quoted: bool, escapes: bool = True) -> list[Piece]:
        """Returns the parts of `node` between two bytes of the script."""
        check(node, whole=False)
        source, base = node.text or b"", node.start_byte
        pieces: list[Piece] = []
        at = start
        for child in node.children:
            if child.start_byte < at or child.end_byte > end:
                continue
            if child.child_count or child.type in ("raw_string", "ansi_c_string"):
                pieces += self._literal(source[at - base : start_of(child) - base], quoted=quoted, escapes=escapes)
                pieces += self.pieces(child, quoted=quoted, escapes=escapes)
                at = child.end_byte
        return pieces + self._literal(source[at - base : end - base], quoted=quoted, escapes=escapes)

    def _literal(self, source: bytes, *, quoted: bool, escapes: bool) -> list[Piece]:
        """Returns the parts of a text of the script: a character after a backslash stands for itself."""
        text = source.decode(errors="replace").replace("\\\n", "")
        if quoted:
            return [Piece(re.sub(r"\\([$`\"\\])", r"\1", text), "quoted")] if text else []
        pieces: list[Piece] = []
        for part in re.split(r"(\\.|\$\w+|\$\{\w+\})", text, flags=re.DOTALL):
            if part[:1] == "$" and part[1:]:  # the grammar leaves variables in patterns as they are
                pieces += self._values(part.strip("${}"), quoted=False)
            elif part[:1] == "\\" and escapes:
                pieces.append(Piece(part[1:], "quoted"))
            elif part:
                pieces.append(Piece(part, "literal"))
        return pieces

    def _element(self, node: Node) -> tuple[str, str]:
        """Returns the name and the key of an array with a subscript."""
        name, index = (node.child_by_field_name(field) for field in ("name", "index"))
        if name is None or index is None:
            return text_in(node), "0"
        variable, key = text_in(name), self.text(index)
        if variable in self.variables.keyed or key in _SPECIAL:
            return variable, key
        key = calculated(key, self.variables)
        if key.startswith("-"):
            elements = self.variables.elements(variable) or {}
            key = str(int(key) + 1 + max((int(key) for key in elements if key.isdigit()), default=-1))
        return variable, key

    def _values(self, name: str, key: str = "0", *, quoted: bool) -> list[Piece]:
        """Returns the value of an element, or of all for the key `@` or `*`."""
        if name in _SPECIAL:
            name, key = "@", name
        elements = self.variables.elements(name)
        if key in _SPECIAL:
            return _emitted(list((elements or {}).values()), quoted=quoted, joined=self._joint(key))
        return _emitted([f"{UNSET}{name}{END}" if elements is None else elements.get(key, "")], quoted=quoted)

    def _joint(self, key: str) -> str | None:
        """Returns what is put between the elements of an array for `key`, the first character of IFS for `*`."""
        return (self.variables.elements("IFS") or {"0": " "})["0"][:1] if key == "*" else None

    def _parameter(self, node: Node, *, quoted: bool) -> list[Piece]:
        """Returns the parts of `${...}`."""
        check(node, whole=False)
        parts = list(node.children[1:-1])
        prefix = text_in(parts.pop(0)) if len(parts) > 1 and not parts[0].is_named else ""
        target = parts.pop(0)
        name, key = self._element(target) if target.type == "subscript" else (text_in(target), "0")
        if name in _SPECIAL:
            name, key = "@", name
        if prefix == "!" and key in _SPECIAL:
            return _emitted(list(self.variables.elements(name) or {}), quoted=quoted, joined=self._joint(key))
        if prefix == "!":
            name, key = _joined(self._values(name, key, quoted=True)), "0"
            if unknown_in(name):
                return _emitted([name], quoted=quoted)
            element = re.fullmatch(r"(\w+)\[(.*)\]", name)
            name, key = (element[1], element[2]) if element else (name, key)
        elements = self.variables.elements(name)
        found = list(elements.values()) if elements and key in _SPECIAL else []
        if elements is not None and key in elements:
            found = [elements[key]]
        if prefix == "#":
            length = str(len(found) if key in _SPECIAL else len("".join(found)))
            return _emitted([computed(f"#{name}") if unknown_in("".join(found)) else length], quoted=quoted)
        if not parts:
            return self._values(name, key, quoted=quoted)
        sign, start, end = text_in(parts[0]), parts[0].end_byte, node.end_byte - 1
        if sign.lstrip(":") in ("-", "=", "+", "?") and sign != "":
            has = bool(found) and (sign[0] != ":" or bool(without_unset("".join(found))))
            if sign[-1] == "+" and not has:
                return _emitted([""], quoted=quoted)
            if has and sign[-1] != "+":
                return _emitted(found, quoted=quoted, joined=self._joint(key))
            if sign[-1] == "?":
                return _emitted([f"{UNSET}{name}{END}"], quoted=quoted)
            default = self._between(node, start, end, quoted=quoted)
            default = [Piece(text, "value" if kind == "literal" else kind) for text, kind in default]
            if sign[-1] == "=":
                self.variables.assign(name, _joined(default), key)
            return default or _emitted([""], quoted=quoted)
        if elements is None and key not in _SPECIAL:
            return self._values(name, quoted=quoted)
        return _emitted(self._edited(node, found, key, parts), quoted=quoted, joined=self._joint(key))

    def _edited(self, node: Node, values: list[str], key: str, parts: Sequence[Node]) -> list[str]:
        """Returns the values of a parameter expansion whose name is followed by `parts`."""
        sign, start, end = text_in(parts[0]), parts[0].end_byte, node.end_byte - 1
        if sign == ":":
            second = next((part for part in parts[1:] if text_in(part) == ":"), None)
            first = self.arithmetic(node, start, end if second is None else second.start_byte)
            count = None if second is None else self.arithmetic(node, second.end_byte, end)
            if first is None or unknown_in("".join(values)):
                return [computed(text_in(node))]
            if key in _SPECIAL:
                first -= text_in(node)[2] in _SPECIAL and first > 0  # arguments count from 1
                return values[first:][:count]
            value = "".join(values)
            return [value[first:][:count] if first >= 0 or -first <= len(value) else ""]
        if sign == "@":
            return [computed(text_in(node))]
        middle = end
        if sign[0] == "/":
            rest = (node.text or b"")[start - node.start_byte : -1]
            middle = start + len(re.sub(rb"((?:\\.|[^/\\])*).*", rb"\1", rest, flags=re.DOTALL))
        pattern = self._between(node, start, middle, quoted=False)
        new = _joined(self._between(node, middle + 1, end, quoted=False))
        if not pattern and sign in ("/#", "/%"):
            return [new + value if sign == "/#" else value + new for value in values]
        return [edited(value, sign, _pattern(pattern), new, self.variables) for value in values]


def _emitted(values: Sequence[str], *, quoted: bool, joined: str | None = None) -> list[Piece]:
    """Returns values as fields of their own. `joined`: quotes make them one, with this between."""
    if quoted and joined is not None:
        values = [joined.join(values)]
    pieces = []
    for value in values:
        pieces += [_BREAK, Piece(value, "quoted" if quoted else "value")]
    return pieces[1:]


def _decoded(text: str) -> str:
    """Returns the text of `$'...'`."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        return text


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _pattern(pieces: Sequence[Piece]) -> str:
    return "".join(glob.escape(text) if kind == "quoted" else text for text, kind in pieces)


def _fields(pieces: Sequence[Piece]) -> list[str]:
    """Returns the fields that the parts of a word form; values that are unknown are not split."""
    fields: list[str] = []
    joins = False
    for text, kind in pieces:
        parts = [text]
        if kind == "break":
            parts = ["", ""]
        elif kind == "value" and not unknown_in(text):
            parts = re.split(r"\s+", text)
        for place, part in enumerate(parts):
            joins = joins and place == 0
            if part or kind == "quoted":
                fields[-1:] = [fields[-1] + part] if joins else [*fields[-1:], part]
                joins = True
    return fields


def _braces(pieces: list[Piece], variables: Variables) -> list[list[Piece]]:
    """Returns the words that `{a,b}` and `{1..3}` in literal text make."""
    if len(pieces) > _PARTS or not any("{" in part.text for part in pieces if part.kind == "literal"):
        return [pieces]
    text = "".join(part.text if part.kind == "literal" else chr(_FIRST + place) for place, part in enumerate(pieces))
    words = _alternatives(text, variables)
    if words == [text]:
        return [pieces]
    return [
        [pieces[ord(sign) - _FIRST] if ord(sign) >= _FIRST else Piece(sign, "literal") for sign in word]
        for word in words
    ]


def _alternatives(text: str, variables: Variables) -> list[str]:
    found = re.search(r"\{([^{}]*,[^{}]*|(-?\d+)\.\.(-?\d+))\}", text)
    if found is None:
        return [text]
    parts: Sequence[str] = found[1].split(",")
    if found[2]:
        first, last = int(found[2]), int(found[3])
        variables.spend(abs(last - first))
        step = 1 if last >= first else -1
        parts = [str(number) for number in range(first, last + step, step)]
    variables.spend(len(parts) * len(text))
    before, after = text[: found.start()], text[found.end() :]
    return [word for part in parts for word in _alternatives(f"{before}{part}{after}", variables)]
