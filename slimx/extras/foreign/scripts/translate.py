"""Translation of single names by the tables: each becomes keys of slimx, or a reason why it becomes none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from slimx.config.schema import Config
from slimx.config.suggestions import OFF, known_keys
from slimx.extras.foreign.find import meaning
from slimx.extras.foreign.meaning import Meaning, Table
from slimx.extras.foreign.scripts.draft import Draft, joined, scalar
from slimx.extras.foreign.scripts.names import Names, readable, whole

_BETWEEN = r" x | / |, or |, "
_SOURCES = re.compile(rf"(--|\w+\.)[\w.-]+(({_BETWEEN})(--|\w+\.)[\w.-]+)*")
"""Comments that consist of names of a script alone."""
UNKNOWN = "slimx has no counterpart for this name"


def translate(draft: Draft, tables: Sequence[Table], name: str, value: str | None, shown: str) -> None:
    """Adds to `draft` what `name` with `value` means by `tables`. `value`: None for a flag without one. `shown`: the
    name as in the script."""
    text = "true" if value is None else value
    found = meaning(tables, name, text)
    if found is None:
        draft.left[shown if value is None else shown + " " + value] = UNKNOWN
        return
    _apply(draft, found, text, shown)


def sets_key(tables: Sequence[Table], name: str) -> bool:
    """Returns True if the value of `name` becomes the value of a key, by `tables`."""
    found = meaning(tables, name, "")
    return found is not None and bool(found.key or found.sets) and not found.note


def put_number(names: Names, key: str, name: str, default: float) -> None:
    """Sets `key` to the number that the script sets `name` to, or to `default`."""
    names.draft.put(key, whole(names.number_or(default, name)), names.shown(name))


def put_count(names: Names, key: str, name: str, default: int) -> int:
    """Sets `key` to the whole number that the script sets `name` to, or to `default`, and returns it."""
    put_number(names, key, name, default)
    return names.count(name, default)


def note_unneeded(names: Names, reason: str, *which: str) -> None:
    """Notes that those of the names `which` that the script sets need no key, for the `reason`."""
    for name in which:
        if names.words(name) is not None:
            names.draft.unneeded[names.shown(name)] = reason


def translate_rest(names: Names, tables: Sequence[Table]) -> None:
    """Translates the names that were not asked for, and notes what the script computes: the reader must supply a value
    that is computed as a whole, and can complete a text. Marks what comes from names that the script does not set."""
    draft = names.draft
    for name in names.rest():
        words = list(names.values[name])
        if sets_key(tables, name):
            words = [names.known(name, word) for word in words]
        if words in (["null"], ["None"]):
            draft.unneeded[names.shown(name)] = "it is not set"
        elif any(words) or name not in names.outputs:
            translate(draft, tables, name, joined([*map(readable, words)]) if words else None, names.shown(name))
    known = ".".join(map(names.shown, names.values)) + "."
    for key, source in draft.sources.items():
        if _SOURCES.fullmatch(source) and not any(f"{name}." in known for name in re.split(_BETWEEN, source)):
            draft.sources[key] = source + " (default)"
    for name, (output, entire) in names.outputs.items():
        shown = names.shown(name)
        output = "$" + output if output.startswith("(") else output
        if not entire:
            draft.left[output + " in " + shown] = "slimx computes nothing of a script; write the value instead"
            continue
        last = shown.rpartition(".")[2]
        named = re.escape(last if "_" in last else shown)
        keys = [key for key, source in draft.sources.items() if re.search(rf"(?<![\w-]){named}(?![\w-])", source)]
        found = meaning(tables, name, "")
        if not keys and found is not None and found.key:
            draft.supply[shown] = f"the value of {output}, which slimx does not compute, for {found.key}"
        else:
            draft.supply[shown] = " in ".join(filter(None, ("the value of " + output, ", ".join(keys))))
        for key in {*keys} - draft.supply.keys():
            draft.sources[key] += f"; supply: {output} is not known, a default is set"


def _apply(draft: Draft, found: Meaning, text: str, shown: str) -> None:
    is_flag = found.closed and {*found.values} == {"true"}
    if (is_flag or found.sets) and text.lower() in OFF:
        draft.unneeded[shown] = "the feature is off unless a key turns it on"
        return
    if found.sets:
        for key, value in found.sets.items():
            draft.put(_first(key), scalar(value.replace("VALUE", json.dumps(text))), shown)
        return
    if found.note and not found.key:
        (draft.unneeded if found.not_needed else draft.left)[shown] = found.note
        return
    if found.note:
        draft.left[shown] = f"set {found.key.replace('.*', '[]')}: {found.note}"
        return
    translated = found.translate("true" if is_flag else text)
    if isinstance(translated, Meaning):
        _apply(draft, translated, text, shown)
    elif translated is None:
        draft.left[shown] = found.key + " has no value for " + text
    elif _inside(found.key):
        draft.put(_first(found.key), scalar(translated), shown)
    else:
        draft.left[shown] = "this version of slimx has no key " + found.key


def _inside(key: str) -> bool:
    """Returns True if `key` is a key of this version of slimx, or below one that takes any names."""
    keys = known_keys(Config)
    free = ("sglang", "megatron", "options", "template")
    return key in keys or any(part in free for part in key.split(".")) or key.startswith("algorithm.")


def _first(key: str) -> str:
    """Returns `key` for the first entry of a list."""
    return key.replace(".*", ".0")
