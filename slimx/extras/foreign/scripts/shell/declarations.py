"""Declarations and redirections of a script."""

from __future__ import annotations

import re

from tree_sitter import Node

from slimx.extras.foreign.scripts.shell.expansion import ANY, computed
from slimx.extras.foreign.scripts.shell.syntax import check, text_in
from slimx.extras.foreign.scripts.shell.words import Words


def declared(node: Node, words: Words) -> bool:
    """Does what `export`, `local`, `declare` and `unset` do."""
    sign = text_in(node.children[0])
    if sign == "unset":
        for word in words.fields(node)[1:]:
            _remove(word, words)
        return True
    options = ""
    for part in node.named_children:
        target = part.child_by_field_name("name") or part
        name, equals, value = words.text(target).partition("=")
        name = name.partition("[")[0]
        if name.startswith("-"):
            options += name
            continue
        inside = bool(words.locals) and sign not in ("export", "readonly") and "g" not in options
        before = words.values.get(name)
        if "A" in options:
            words.keyed.add(name)
        if part.type == "variable_assignment":
            words.assigned(part)
        elif equals:
            words.store(name, value)
        elif inside:
            words.values.pop(name, None)
        if inside:
            words.locals[-1].setdefault(name, before)
        if re.search("[ilnu]", options):
            words.typed |= {name, *(words.values.get(name) or {}).values()}
    return True


def _remove(word: str, words: Words) -> None:
    """Removes a variable; if it loses one element, no other is known."""
    name, bracket, _ = word.partition("[")
    words.values.pop(name, None)
    if bracket:
        words.values[name] = {ANY: computed("unset " + word)}


def redirections(node: Node, words: Words) -> tuple[str | None, str | None, bool, list[Node]]:
    """Returns the text that a command reads, the file that it writes, whether it appends to that, and its words that
    follow a redirection, which the grammar counts to it."""
    redirects = node.children_by_field_name("redirect")
    for redirect in list(redirects):
        redirects += redirect.children_by_field_name("redirect")
    stdin = target = None
    append = False
    extra: list[Node] = []
    for redirect in redirects:
        check(redirect, words.script, whole=redirect.type == "file_redirect")
        destinations = redirect.children_by_field_name("destination")
        extra += destinations[1:]
        sign = text_in(redirect.children[0])  # a number, if it is not the standard output
        if redirect.type == "heredoc_redirect":
            stdin = words.document(redirect)
        elif destinations and ">" in sign:
            target, append = words.text(destinations[0]), sign == ">>"
    return stdin, target, append, extra
