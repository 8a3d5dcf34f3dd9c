"""Search in the keys of the configuration: by key, section, name in another framework, or word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimx.config.schema import Config
from slimx.config.suggestions import for_flag
from slimx.errors import SlimxError
from slimx.extras.keys.catalog import Heading, Key, all_keys, headings
from slimx.extras.keys.names import foreign_names, keys_of, plain_names

PATH, OTHER, TEXT, NOWHERE = 2, 3, 4, 5
"""Ranks of matches in the dotted key, in names of other frameworks and in the description, and of no match."""
PLACEHOLDER = "VALUE"
"""Value in the sentences that translate a foreign name."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search: a list of keys, or the keys of sections."""

    keys: tuple[Key, ...] = ()
    whole: bool = False
    """True if the keys were named, so that their whole documentation is shown."""
    also: tuple[Key, ...] = ()
    """Further keys with this word in their names, which are listed."""
    sections: tuple[Heading, ...] = ()
    """Sections whose keys are listed."""
    sentence: str = ""
    """Translation of a name of another framework; "" for other searches."""
    words: tuple[str, ...] = ()
    """Words to highlight."""


def search(words: Sequence[str]) -> list[Found]:
    """Returns the results for `words`: one result for each word that is a key, a section or a name in another
    framework, and one for all other words together, which a key must contain, in its names or its text. Raises
    SlimxError, with the nearest names, if a search has no result."""
    results, rest = [], []
    for word in " ".join(words).split():  # an argument may be several words
        found = _named(_plain(word))
        if found is None:
            rest.append(_plain(word))
        else:
            results.append(found)
    if rest:
        keys = _containing(rest)
        if not keys:
            raise _nothing(rest)
        results.append(Found(keys, words=tuple(rest)))
    return results


def _plain(word: str) -> str:
    """Returns a word as it is compared: without leading dashes and a value, in lower case, with underscores."""
    return word.lstrip("-").partition("=")[0].rstrip("+:").lower().replace("-", "_")


def same_key(written: str) -> str:
    """Returns the dotted key `written` without list indices, names of policies and `*`, for comparison."""
    parts = re.sub(r"\[[^]]*\]", "", re.sub(r"^(policies\.)\w+\.", r"\1", written)).split(".")
    return ".".join(part for part in parts if part != "*" and not part.isdigit())


def _named(word: str) -> Found | None:
    """Returns the result for a key, a section or a foreign name; None if `word` is none of them."""
    plain = same_key(word)
    keys = tuple(key for path, key in all_keys().items() if _within(same_key(path), [plain]))
    if keys:
        return Found(keys, whole=True)
    sections = tuple(
        heading for heading in headings() if f"{same_key(heading.path)}.".startswith(f"{plain}.") and plain
    )
    if sections:
        return Found(sections=sections)
    through = _through(plain)
    if through:
        return Found((through,), whole=True)
    sentence = for_flag(Config, f"--{word}", PLACEHOLDER)
    if sentence is None or word not in plain_names():
        return None
    meant = keys_of(word)
    named = tuple(key for path, key in all_keys().items() if _mentions(sentence, path) or _within(path, meant))
    also = tuple(key for key in _containing([word], worst=PATH) if key not in named)
    return Found(named, True, also, sentence=f"{word} of other frameworks: {sentence}", words=(word,))


def _within(path: str, keys: Iterable[str]) -> bool:
    """Returns True if one of `keys` is the key `path`, or is in the mapping that it takes."""
    return any(f"{key}.".startswith(f"{path}.") for key in keys)


def _mentions(sentence: str, path: str) -> bool:
    written = re.sub(r"(\[\]|\.0)(?=[.=\s,;]|$)", ".*", sentence)
    return re.search(rf"(?<![\w.]){re.escape(path)}(?![\w.*])", written) is not None


def _through(plain: str) -> Key | None:
    """Returns the key `plain` of a section that has the same keys as another one; None if there is none."""
    for heading in headings():
        above = f"{same_key(heading.path)}."
        if heading.like and plain.startswith(above):
            return all_keys().get(f"{heading.like}.{plain.removeprefix(above)}")
    return None


def _containing(words: Sequence[str], worst: int = TEXT) -> tuple[Key, ...]:
    """Returns the keys that contain all `words`, the best matches first; matches of a higher rank than `worst` are left
    out."""
    ranked = []
    for order, (path, key) in enumerate(all_keys().items()):
        ranks = [_rank(word, key, foreign_names().get(path, ())) for word in words]
        if max(ranks) <= worst:
            ranked.append((sum(ranks), order, key))
    return tuple(key for _, _, key in sorted(ranked, key=lambda entry: entry[:2]))


def _rank(word: str, key: Key, others: Iterable[str]) -> int:
    """Returns how well a key matches `word`: 0 for a key of this name, higher for weaker matches, `NOWHERE` if the key
    does not contain the word. `others`: the key's names in other frameworks."""
    if word == key.name:
        return 0
    if word in key.name.split("_"):
        return 1
    if len(word) <= 2:
        return NOWHERE
    if word in key.path or word in key.choices:
        return PATH
    if any(word in other.lower().replace("-", "_") for other in others):
        return OTHER
    text = f"{key.text} {key.default} {' '.join(key.choices)}".lower()
    if re.search(rf"\b{re.escape(word)}s?\b", text) or re.search(rf"\b{re.escape(word.replace('_', ' '))}", text):
        return TEXT
    return NOWHERE


def _nothing(words: Sequence[str]) -> SlimxError:
    written = " ".join(words)
    names = {same_key(path): path for path in all_keys()}
    parts: dict[str, str] = {}
    for path, key in all_keys().items():
        parts.setdefault(key.name, path)
    last = words[-1].rpartition(".")[2]
    near = [path for path, key in all_keys().items() if key.name == last][:2]
    sections = {heading.path: heading.path for heading in headings()}
    for known in (sections, names, parts, {name: f"--{name.replace('_', '-')}" for name in plain_names()}):
        for name in difflib.get_close_matches(words[-1], known, n=2, cutoff=0.75):
            near.append(known[name])
    hint = "run `slimx keys` for all sections"
    if near:
        hint = f"did you mean {' or '.join(dict.fromkeys(near[:3]))}?"
    return SlimxError(
        f"no key of the configuration, no description and no name of another framework contains {written}; {hint}",
        code="keys.none",
        about=written,
    )
