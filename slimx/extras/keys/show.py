"""Results of a search in the configuration's keys, as text for a terminal or as plain values for JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from slimx.errors import counted
from slimx.extras.keys.catalog import Heading, Key, headings
from slimx.extras.keys.names import aliases_of, foreign_names
from slimx.extras.keys.pages import pages_of, purpose_of
from slimx.extras.keys.search import Found
from slimx.json_types import Json

MARK = "bold yellow"
"""Style of the words that were searched for."""
type Shown = Text | Table


def overview() -> Iterator[Shown]:
    """Yields the list of all top-level sections."""
    table = _grid()
    for heading in headings():
        name = heading.path.removesuffix(".*")
        if "." not in name:
            count = sum(len(other.keys) for other in headings() if f"{other.path}.".startswith(f"{name}."))
            table.add_row(Text(name, style="bold"), counted(count, "key"), Text(purpose_of(name)))
    yield table
    yield Text("slimx keys SECTION lists its keys, slimx keys KEY explains one, slimx keys WORD searches.")


def lines_of(found: Found) -> Iterator[Shown]:
    """Yields the text of one result."""
    if found.sentence:
        yield Text(found.sentence)
    for heading in found.sections:
        yield from _section(heading)
    if found.whole:
        for key in found.keys:
            yield from _whole(key)
    listed = found.also if found.whole else found.keys
    if listed:
        table = _grid()
        for key in listed:
            about = _about(key, found.words)
            row = Text(key.path, style="bold"), Text(_without_marks(key.default)), Text(about)
            for cell in row:
                _highlight(cell, found.words)
            table.add_row(*row)
        yield table


def record_of(key: Key) -> Json:
    """Returns a key as plain values."""
    return {
        "key": key.path,
        "type": _without_marks(key.type),
        "default": None if key.default == "required" else _without_marks(key.default),
        "required": key.default == "required",
        "choices": list(key.choices),
        "kinds": list(key.kinds),
        "description": key.text,
        "aliases": aliases_of(key.path),
        "elsewhere": list(foreign_names().get(key.path, ())),
        "pages": list(pages_of(key.path.rpartition(".")[0])),
    }


def first_sentence(text: str) -> str:
    """Returns the first sentence of a description, without its full stop."""
    found = re.match(r"(.+?)(?:[.] |[.;]?$|; )", text)
    return found[1] if found else text


def _section(heading: Heading) -> Iterator[Shown]:
    text = heading.text or purpose_of(heading.path)
    title = Text(heading.path, style="bold underline")
    yield title.append(f"  {text}", style="not bold not underline") if text else title
    if heading.like:
        yield Text(f"  the keys of {heading.like}")
        return
    table = _grid()
    for key in heading.keys:
        table.add_row(
            Text(f"  {key.name}", style="bold"), Text(_without_marks(key.default)), Text(first_sentence(key.text))
        )
    yield table
    yield Text(f"  docs: {', '.join(pages_of(heading.path))}", style="dim")


def _whole(key: Key) -> Iterator[Shown]:
    yield Text(key.path, style="bold underline")
    yield Text(f"  {key.text}")
    table = _grid()
    rows = [("type", [key.type]), ("default", [key.default]), ("choices", key.choices), ("kinds", key.kinds)]
    rows += [("aliases", aliases_of(key.path)), ("elsewhere", foreign_names().get(key.path, ()))]
    rows += [("docs", pages_of(key.path.rpartition(".")[0]))]
    for name, values in rows:
        if values:
            table.add_row(f"  {name}", Text(_without_marks(", ".join(values))))
    yield table


def _about(key: Key, words: Sequence[str]) -> str:
    """Returns the first sentence of a key's description and, if the words occur only later or in a name of another
    framework, that place."""
    first = first_sentence(key.text)
    shown = f"{key.path} {first}".lower()
    for word in words:
        if word in shown:
            continue
        for other in foreign_names().get(key.path, ()):
            if word in other.lower().replace("-", "_"):
                return f"{first} ({other})"
        for clause in re.split("[.;] ", key.text):
            if word in clause.lower():
                return f"{first}; {clause.rstrip('.')}"
    return first


def _highlight(text: Text, words: Sequence[str]) -> None:
    for word in words:
        text.highlight_regex(rf"(?i){re.escape(word).replace('_', '[-_ ]')}", MARK)


def _without_marks(text: str) -> str:
    return text.replace("`", "")


def _grid() -> Table:
    return Table.grid(padding=(0, 2))
