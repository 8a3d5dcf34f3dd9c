"""Syntax trees of shell scripts, by tree-sitter's grammar of bash."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Query, QueryCursor

from slimx.errors import SlimxError

_SECONDS = 3
"""Maximum time of parsing a script, whose text may be made to take long."""
_CHUNK = 4096
_PASSES = 20
"""Maximum number of times that a script is parsed to mend what the grammar does not know."""
_MENDED = (
    (rb"(?m)^([^#\n]*[^\s\\])\\\n(?=\S)", rb"\1"),  # a line that ends inside a word
    (rb"(\$\{\w+:?[-=+])(\$\(\((?:[^()]|\([^()]*\))*\)\)|\[[^][{}\"$\s]+\])\}", rb'\1"\2"}'),  # ${A:-$((1))}, ${A:-[1]}
)
_RAW = r"""
(raw_string) @raw
((heredoc_redirect (heredoc_start) @start (heredoc_body) @raw) (#match? @start "^\\W"))
"""
"""Texts in which every character stands for itself."""


def parsed(text: str) -> Node:
    """Returns the root of the syntax tree of the script `text`. Raises SlimxError if it takes too long."""
    end = time.monotonic() + _SECONDS
    source = text.replace("\r\n", "\n").encode(errors="replace") + b"\n"
    language = Language(tree_sitter_bash.language())
    for pattern, new in _MENDED:
        if re.search(pattern, source):
            raw = bytearray(len(source))
            for node in (
                QueryCursor(Query(language, _RAW)).captures(_root(Parser(language), source, end)).get("raw", [])
            ):
                raw[node.start_byte : node.end_byte] = b"1" * (node.end_byte - node.start_byte)
            source = re.sub(pattern, partial(_mended, new, bytes(raw)), source)
    query = Query(language, '(command (variable_assignment) @assignment) "$" @dollar')
    for _ in range(_PASSES):
        root = _root(Parser(language), source, end)
        found = QueryCursor(query).captures(root)
        mended = {}
        for node in found.get("assignment", []):
            if _ends_line(node, source):
                mended[node.end_byte] = b";"
        for node in found.get("dollar", []):
            name = re.compile(rb"\d|[A-Za-z_]\w*").match(source, node.end_byte)
            parent = node.parent
            if name and parent and (parent.type, parent.end_byte) != ("simple_expansion", name.end()):
                mended |= {node.end_byte: b"{", name.end(): b"}"}
        if not mended:
            break
        for place in sorted(mended, reverse=True):
            source = source[:place] + mended[place] + source[place:]
    return root


def _mended(new: bytes, raw: bytes, match: re.Match[bytes]) -> bytes:
    return match.expand(new) if raw[match.end() - 1] == 0 else match[0]


def _root(parser: Parser, source: bytes, end: float) -> Node:
    def read(start: int, _: object) -> bytes:
        return source[start : start + _CHUNK]

    try:
        return parser.parse(read, progress_callback=lambda *_: time.monotonic() > end).root_node
    except ValueError as error:
        raise SlimxError(
            "the script takes too long to read; give a file with only the flags", code="foreign.endless", about="script"
        ) from error


def _ends_line(node: Node, source: bytes) -> bool:
    """Returns True if an assignment is the end of its line: the grammar joins the next line to a line with several
    assignments, as if they were set for its command."""
    following = node.next_sibling
    while following is not None and following.type == "comment":
        following = following.next_sibling
    return following is not None and b"\n" in source[node.end_byte : following.start_byte].replace(b"\\\n", b"")


def text_in(node: Node) -> str:
    """Returns the text of `node` in the script, without blanks around it."""
    return (node.text or b"").decode(errors="replace").strip()


def start_of(node: Node) -> int:
    """Returns the byte at which `node` starts; the grammar counts blanks before an expansion to it."""
    text = node.text or b""
    return node.start_byte + len(text) - len(text.lstrip())


def check(node: Node, script: Path, *, whole: bool = False) -> None:
    """Raises SlimxError if `node` of `script` is no correct syntax: in its own words, or anywhere inside if `whole`."""
    if not (whole and node.has_error) and not any(part.is_error or part.is_missing for part in (node, *node.children)):
        return
    nodes = [node]
    for part in nodes:
        nodes += [child for child in part.children if child.has_error or child.is_missing]
    errors = [part for part in nodes if part.is_error]
    # Where something is missing, the line is that of the construct that does not end.
    wrong = errors[0] if errors else next(part.parent for part in nodes if part.is_missing) or node
    # Of words that form no command the first sign is named: what is before it can be commands.
    signs = [part for part in wrong.children if wrong.is_error and not part.is_named]
    place = (signs or [wrong])[0].start_byte - wrong.start_byte
    text = wrong.text or b""
    line = wrong.start_point.row + 1 + text.count(b"\n", 0, place)
    near = text[place:].decode(errors="replace").strip().partition("\n")[0][:40]
    raise SlimxError(
        f"{script}, line {line}: this is not correct syntax of a shell, near {near!r}; correct it, or give a file with "
        "only the flags",
        code="foreign.syntax",
        about=f"line {line}",
    )
